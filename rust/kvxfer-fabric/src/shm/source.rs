//! The source's side: readers attach here and are given descriptors and a region table.

use super::blob::{ProcessKey, Token, same_token};
use super::poller::{Poller, Subject};
use super::ptracer::Leave;
use super::sock::{self, Received};
use super::wire::{ENTRIES_A_PACKET, Entry, FDS_A_PACKET, HELLO_LEN, Hello, Packet, Place, Refusal};
use super::{ShmOptions, ShmPool, host, process};
use crate::{Backing, FabricError};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Connections accepted in one call, so that a flood does not hold the transfer thread.
const ACCEPTS_A_CALL: usize = 16;
/// Packets sent to one reader in one call.
const SENDS_A_CALL: usize = 8;

/// What readers are given.
#[derive(Debug)]
pub(crate) struct Exports {
    pub(crate) entries: Vec<Entry>,
    /// The pools that the entries' descriptor numbers mean.
    pub(crate) pools: Vec<Arc<dyn Backing>>,
}

impl Exports {
    fn needs_ptrace(&self) -> bool {
        self.entries.iter().any(|e| matches!(e.place, Place::Process { .. }))
    }

    fn packets(&self) -> usize {
        1 + self.entries.len().div_ceil(ENTRIES_A_PACKET) + self.pools.len().div_ceil(FDS_A_PACKET)
    }

    /// The packet with this number of the answer, and its descriptors.
    fn packet(&self, n: usize) -> (Packet, Vec<BorrowedFd<'_>>) {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let Some(n) = n.checked_sub(1) else {
            let head = Packet::Head { regions: count(self.entries.len()), fds: count(self.pools.len()) };
            return (head, Vec::new());
        };
        if let Some(chunk) = self.entries.chunks(ENTRIES_A_PACKET).nth(n) {
            return (Packet::Table(chunk.to_vec()), Vec::new());
        }
        let n = n - self.entries.len().div_ceil(ENTRIES_A_PACKET);
        let fds: Vec<BorrowedFd<'_>> = self
            .pools
            .chunks(FDS_A_PACKET)
            .nth(n)
            .unwrap_or(&[])
            .iter()
            .filter_map(|b| b.as_any().downcast_ref::<ShmPool>().map(ShmPool::fd))
            .collect();
        (Packet::Fds(count(fds.len())), fds)
    }
}

#[derive(Debug)]
enum State {
    /// Has said nothing yet.
    Silent,
    /// Showed a token; so many packets of the answer are sent.
    Attached { sent: usize, waits: bool },
}

#[derive(Debug)]
struct Conn {
    fd: OwnedFd,
    peer: sock::Peer,
    state: State,
    key: Option<ProcessKey>,
    /// The passive endpoint that it belongs to.
    bound: Option<u32>,
    _leave: Option<Leave>,
}

/// What the fabric must know of the source's side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Note {
    /// This reader attached with connection `conn`, which belongs to no endpoint yet.
    Attached { conn: u32, key: ProcessKey },
    /// The reader of this endpoint closed its connection.
    Left { ep: u32 },
}

#[derive(Debug)]
pub(crate) struct Source {
    listener: OwnedFd,
    listening: bool,
    name: Vec<u8>,
    tokens: VecDeque<Token>,
    exports: Exports,
    conns: BTreeMap<u32, Conn>,
    next_conn: u32,
    uid: u32,
    options: ShmOptions,
}

impl Source {
    pub(crate) fn new(
        exports: Exports,
        uid: u32,
        options: ShmOptions,
        poller: &Poller,
    ) -> Result<Self, FabricError> {
        let tag = super::random::<16>()?;
        let name =
            format!("kvxfer-shm-{}-{:032x}", std::process::id(), u128::from_le_bytes(tag)).into_bytes();
        let listener = sock::listen(&name)?;
        poller.add(&listener, Subject::Listener)?;
        Ok(Self {
            listener,
            listening: true,
            name,
            tokens: VecDeque::new(),
            exports,
            conns: BTreeMap::new(),
            next_conn: 0,
            uid,
            options,
        })
    }

    pub(crate) fn name(&self) -> &[u8] {
        &self.name
    }

    /// A fresh token; the oldest one is forgotten when there are too many.
    pub(crate) fn new_token(&mut self) -> Result<Token, FabricError> {
        let token = super::random::<32>()?;
        while self.tokens.len() >= self.options.max_tokens.max(1) {
            self.tokens.pop_front();
        }
        self.tokens.push_back(token);
        Ok(token)
    }

    /// Takes the token off the list if it is on it. Looks at all of them, whichever fits.
    fn use_token(&mut self, token: &Token) -> bool {
        let mut found = None;
        for (i, t) in self.tokens.iter().enumerate() {
            if same_token(t, token) {
                found = Some(i);
            }
        }
        found.and_then(|i| self.tokens.remove(i)).is_some()
    }

    /// The newest connection of this reader that belongs to no endpoint and is not closed yet.
    pub(crate) fn unbound(&self, key: &ProcessKey) -> Option<u32> {
        let fits = |c: &Conn| c.bound.is_none() && c.key == Some(*key) && !sock::hung_up(&c.fd);
        self.conns.iter().rev().find(|(_, c)| fits(c)).map(|(id, _)| *id)
    }

    /// Gives a connection to an endpoint; `false` if it is closed or another's.
    pub(crate) fn bind(&mut self, conn: u32, ep: u32) -> bool {
        match self.conns.get_mut(&conn) {
            Some(c) if c.bound.is_none() => {
                c.bound = Some(ep);
                true
            }
            _ => false,
        }
    }

    /// Closes the connection.
    pub(crate) fn close(&mut self, conn: u32, poller: &Poller) -> Option<u32> {
        let c = self.conns.remove(&conn)?;
        poller.remove(&c.fd);
        c.bound
    }

    fn drop_conn(&mut self, conn: u32, why: &str, poller: &Poller, notes: &mut Vec<Note>) {
        let pid = self.conns.get(&conn).map(|c| c.peer.pid);
        tracing::debug!(conn, pid, why, "shm connection dropped");
        if let Some(ep) = self.close(conn, poller) {
            notes.push(Note::Left { ep });
        }
    }

    /// Takes new readers.
    pub(crate) fn accept(&mut self, poller: &mut Poller, notes: &mut Vec<Note>) {
        for _ in 0..ACCEPTS_A_CALL {
            match sock::accept(&self.listener) {
                Ok(Some(fd)) => self.admit(fd, poller, notes),
                Ok(None) => return,
                Err(error) => {
                    // Out of descriptors: readers wait in the kernel's queue. Not to be woken for them
                    // meanwhile, or the thread would spin.
                    tracing::warn!(%error, "accept on the shm socket failed");
                    if let Some(id) = self.oldest(|c| matches!(c.state, State::Silent)) {
                        self.drop_conn(id, "out of descriptors", poller, notes);
                    }
                    poller.remove(&self.listener);
                    self.listening = false;
                    poller.retry_soon();
                    return;
                }
            }
        }
    }

    /// Listens again after [`Source::accept`] had to stop.
    pub(crate) fn resume(&mut self, poller: &mut Poller) {
        if !self.listening {
            self.listening = poller.add(&self.listener, Subject::Listener).is_ok();
            if !self.listening {
                poller.retry_soon();
            }
        }
    }

    fn oldest(&self, which: impl Fn(&Conn) -> bool) -> Option<u32> {
        self.conns.iter().find(|(_, c)| which(c)).map(|(id, _)| *id)
    }

    fn admit(&mut self, fd: OwnedFd, poller: &mut Poller, notes: &mut Vec<Note>) {
        let peer = match sock::peer(&fd) {
            Ok(peer) => peer,
            Err(error) => {
                tracing::debug!(%error, "a reader without credentials");
                return;
            }
        };
        if peer.uid != self.uid && peer.uid != 0 {
            refuse(&fd, Refusal::User);
            return;
        }
        let silent = |c: &Conn| matches!(c.state, State::Silent);
        if self.conns.values().filter(|c| silent(c)).count() >= self.options.max_silent.max(1)
            && let Some(id) = self.oldest(silent)
        {
            self.drop_conn(id, "too many that say nothing", poller, notes);
        }
        let id = self.next_conn;
        if self.conns.contains_key(&id) || poller.add(&fd, Subject::Conn(id)).is_err() {
            return;
        }
        self.next_conn = self.next_conn.wrapping_add(1);
        self.conns.insert(id, Conn { fd, peer, state: State::Silent, key: None, bound: None, _leave: None });
        // A reader says hello as it connects, so there is nothing to wait for.
        self.conn_event(id, poller, notes);
    }

    /// Something happened on a connection.
    pub(crate) fn conn_event(&mut self, id: u32, poller: &Poller, notes: &mut Vec<Note>) {
        let Some(conn) = self.conns.get(&id) else { return };
        let mut buf = [0u8; HELLO_LEN];
        match (sock::recv_plain(&conn.fd, &mut buf), &conn.state) {
            (Ok(Received::Nothing), State::Silent) => {}
            (Ok(Received::Nothing), State::Attached { .. }) => self.send(id, poller, notes),
            (Ok(Received::End), _) => self.drop_conn(id, "the reader closed it", poller, notes),
            (Ok(Received::Packet(n)), State::Silent) => match buf.get(..n).and_then(Hello::decode) {
                Some(hello) => match self.attach(id, &hello) {
                    Ok(key) => {
                        self.trim_unbound(id, poller, notes);
                        notes.push(Note::Attached { conn: id, key });
                        self.send(id, poller, notes);
                    }
                    Err(why) => self.refuse_conn(id, why, poller, notes),
                },
                None => self.refuse_conn(id, Refusal::Hello, poller, notes),
            },
            (Err(_), State::Silent) => {
                self.refuse_conn(id, Refusal::Hello, poller, notes);
            }
            (Ok(Received::Packet(_)), State::Attached { .. }) => {
                self.drop_conn(id, "it said more than hello", poller, notes);
            }
            (Err(error), State::Attached { .. }) => {
                self.drop_conn(id, &error.to_string(), poller, notes);
            }
        }
    }

    fn refuse_conn(&mut self, id: u32, why: Refusal, poller: &Poller, notes: &mut Vec<Note>) {
        if let Some(c) = self.conns.get(&id) {
            refuse(&c.fd, why);
            tracing::warn!(pid = c.peer.pid, why = why.text(), "a reader was refused");
        }
        self.drop_conn(id, why.text(), poller, notes);
    }

    fn attach(&mut self, id: u32, hello: &Hello) -> Result<ProcessKey, Refusal> {
        if !self.use_token(&hello.token) {
            return Err(Refusal::Token);
        }
        let conn = self.conns.get_mut(&id).ok_or(Refusal::Hello)?;
        let pid = conn.peer.pid;
        // A reader that died since has nothing to attach for.
        let start = host::start_time(pid).ok_or(Refusal::Hello)?;
        if !matches!(process::watch(pid, start), Ok(Some(_))) {
            return Err(Refusal::Hello);
        }
        let leave = if self.exports.needs_ptrace() {
            Some(Leave::give(pid, self.options.allow_any_ptracer).ok_or(Refusal::Ptracer)?)
        } else {
            None
        };
        let key = ProcessKey { pid, start, instance: hello.instance };
        conn.key = Some(key);
        conn._leave = leave;
        conn.state = State::Attached { sent: 0, waits: false };
        Ok(key)
    }

    /// Keeps the number of attached readers that no endpoint claims in bounds.
    fn trim_unbound(&mut self, newest: u32, poller: &Poller, notes: &mut Vec<Note>) {
        let unbound = |c: &Conn| c.bound.is_none() && c.key.is_some();
        if self.conns.values().filter(|c| unbound(c)).count() > self.options.max_unclaimed.max(1)
            && let Some(id) = self.oldest(unbound).filter(|id| *id != newest)
        {
            self.drop_conn(id, "too many that no endpoint claims", poller, notes);
        }
    }

    fn send(&mut self, id: u32, poller: &Poller, notes: &mut Vec<Note>) {
        let total = self.exports.packets();
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let State::Attached { sent, waits } = &mut conn.state else { return };
        let mut failed = None;
        let mut blocked = false;
        for _ in 0..SENDS_A_CALL {
            if *sent >= total {
                break;
            }
            let (packet, fds) = self.exports.packet(*sent);
            match sock::send(&conn.fd, &packet.encode(), &fds) {
                Ok(true) => *sent += 1,
                Ok(false) => {
                    blocked = true;
                    break;
                }
                Err(error) => {
                    failed = Some(error.to_string());
                    break;
                }
            }
        }
        let want = blocked || *sent < total;
        if failed.is_none() && want != *waits {
            *waits = want;
            failed = poller.want_room(&conn.fd, Subject::Conn(id), want).err().map(|e| e.to_string());
        }
        if let Some(why) = failed {
            self.drop_conn(id, &why, poller, notes);
        }
    }
}

fn refuse(fd: &OwnedFd, why: Refusal) {
    // Closing with something unread would discard the answer at the other end.
    let _ = sock::recv_plain(fd, &mut [0u8; HELLO_LEN]);
    // Only a courtesy: the reader also understands a closed connection.
    let _ = sock::send(fd, &Packet::Refused(why).encode(), &[]);
}
