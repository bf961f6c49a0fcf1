//! The directory: every agent is one. It knows itself and whoever registered with it.

use super::peers::is_final;
use super::{Driver, Retry};
use crate::address::{DEFAULT_PORT, HostPort};
use crate::control::{ConnId, ConnKind};
use kvxfer_proto::msg::{Entries, Entry, Frame, Lookup, Msg, Purpose};
use kvxfer_proto::node::{Direction, PeerKey, RankInfo, Resolving, Source};
use kvxfer_proto::{Reason, ReasonKind, SessionNo, Side, Time};
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

/// Times that a directory is asked only to tell its ranks of rooms that have ended; some 5 s in all.
const TRIES_TO_TELL: u32 = 12;

/// What the directory part of an agent knows.
#[derive(Debug, Default)]
pub(super) struct Directory {
    /// Where this agent registers.
    at: Option<HostPort>,
    registering: Option<ConnId>,
    /// Look-ups of ours, by connection.
    lookups: HashMap<ConnId, Source>,
    /// What others came for, by connection; a look-up is one question.
    visitors: HashMap<ConnId, Purpose>,
    /// Registered ranks, by the connection that keeps them.
    entries: Vec<(ConnId, Entry)>,
    /// Addresses of ranks may be kept that nothing will come for.
    pub(super) stale: bool,
}

impl Directory {
    pub(super) fn new(at: Option<&str>) -> Result<Self, String> {
        let at = at.map(|a| HostPort::parse(a, DEFAULT_PORT)).transpose()?;
        Ok(Self { at, ..Self::default() })
    }

    /// Entries of its tables.
    pub(super) fn len(&self) -> usize {
        self.lookups.len() + self.visitors.len() + self.entries.len()
    }
}

/// Sessions of connections that are not hand-offs have no numbers of their own.
const ONLY_SESSION: SessionNo = SessionNo(1);

impl Driver {
    /// Registers with the directory, and again whenever the connection is lost.
    pub(super) fn register(&mut self, now: Time) {
        let Some(at) = self.directory.at.clone().filter(|_| self.directory.registering.is_none()) else {
            return;
        };
        self.directory.registering = Some(self.control.dial(now, &at, ConnKind::Register, ONLY_SESSION));
    }

    /// Asks a source's directory for its ranks.
    pub(super) fn resolve(&mut self, now: Time, source: &Source) {
        let tries = self.attempts.get(&Retry::Resolve(source.clone())).copied().unwrap_or(0);
        let go_on = match self.node.resolving(source) {
            Some(Resolving::RoomsWait) => true,
            Some(Resolving::OnlyToTell) => tries < TRIES_TO_TELL,
            None => false,
        };
        if !go_on {
            self.node.handle_resolve_stopped(source);
            self.attempts.remove(&Retry::Resolve(source.clone()));
            return;
        }
        if self.directory.lookups.values().any(|s| s == source) {
            return;
        }
        match HostPort::parse(&source.address, DEFAULT_PORT) {
            Ok(at) => {
                let conn = self.control.dial(now, &at, ConnKind::Lookup(source.clone()), ONLY_SESSION);
                self.directory.lookups.insert(conn, source.clone());
            }
            Err(e) => self.node.handle_resolved(now, source, Err(Reason::new(ReasonKind::PeerLost, e))),
        }
    }

    fn send_plain(&mut self, conn: ConnId, msg: Msg) {
        let frame = Frame { incarnation: self.me.incarnation, session: ONLY_SESSION, number: 0, msg };
        self.control.send(conn, &frame);
    }

    /// A connection to a directory, or to us as one, passed its handshake.
    pub(super) fn directory_up(&mut self, conn: ConnId, kind: &ConnKind, purpose: Purpose) {
        match kind {
            ConnKind::Lookup(_) => self.send_plain(conn, Msg::Lookup(Lookup { engine: String::new() })),
            ConnKind::Register => {
                self.attempts.remove(&Retry::Register);
                let entry = self.own_entry(conn);
                self.send_plain(conn, Msg::Register(entry));
            }
            ConnKind::Accepted => {
                self.directory.visitors.insert(conn, purpose);
            }
            ConnKind::Transfer(_) => {}
        }
    }

    /// This rank as the peer of a connection can reach it.
    fn own_entry(&self, conn: ConnId) -> Entry {
        let listen = self.control.address();
        let address = match self.control.local_address(conn) {
            Some(local) if listen.ip().is_unspecified() => {
                SocketAddr::new(local.ip().to_canonical(), listen.port())
            }
            _ => listen,
        };
        let side = self.node.side();
        Entry {
            name: self.me.name.clone(),
            engine: self.me.engine.clone(),
            dp_rank: self.me.dp_rank,
            incarnation: self.me.incarnation,
            groups: side.groups.clone(),
            shard: side.shard,
            address: address.to_string(),
        }
    }

    pub(super) fn directory_frame(&mut self, now: Time, conn: ConnId, kind: ConnKind, frame: Frame) {
        match (kind, frame.msg) {
            (ConnKind::Accepted, Msg::Lookup(m))
                if self.directory.visitors.get(&conn) == Some(&Purpose::Lookup) =>
            {
                self.directory.visitors.remove(&conn);
                let mut entries = vec![self.own_entry(conn)];
                entries.extend(self.directory.entries.iter().map(|(_, e)| e.clone()));
                if !m.engine.is_empty() {
                    entries.retain(|e| e.engine == m.engine);
                }
                self.send_plain(conn, Msg::Entries(Entries { entries }));
            }
            (ConnKind::Accepted, Msg::Register(entry))
                if self.directory.visitors.get(&conn) == Some(&Purpose::Register) =>
            {
                let incarnation = frame.incarnation;
                // Before it takes anybody's place.
                if entry.incarnation != incarnation {
                    let text = format!("incarnation {incarnation} registers {}", entry.incarnation);
                    self.control.close(conn, Reason::new(ReasonKind::ProtocolError, text));
                    return;
                }
                // A rank that restarted takes its old entry's place, also before the old connection is seen to end.
                let same = |e: &Entry| {
                    (&e.engine, e.dp_rank, e.shard) == (&entry.engine, entry.dp_rank, entry.shard)
                };
                // An agent is one rank, however many connections it has.
                self.directory
                    .entries
                    .retain(|(c, e)| *c != conn && !same(e) && e.incarnation != incarnation);
                let most = self.control.limits().registrations;
                if self.directory.entries.len() >= most {
                    let text = format!("{most} ranks have registered already");
                    self.control.limit(conn, Reason::new(ReasonKind::Unhealthy, text));
                } else {
                    self.directory.entries.push((conn, entry));
                }
            }
            (ConnKind::Lookup(source), Msg::Entries(m)) => self.entries_arrived(now, conn, &source, m),
            (_, Msg::Ping(n)) => self.send_plain(conn, Msg::Pong(n)),
            (_, Msg::Pong(_) | Msg::Bye(_)) => {}
            (_, other) => {
                let text = format!("{} on a directory connection", other.name());
                self.control.close(conn, Reason::new(ReasonKind::ProtocolError, text));
            }
        }
    }

    fn entries_arrived(&mut self, now: Time, conn: ConnId, source: &Source, m: Entries) {
        self.control.close(conn, Reason::new(ReasonKind::Closed, "the look-up is answered"));
        if self.directory.lookups.remove(&conn).is_none() {
            return;
        }
        match ranks_of(source, m) {
            Ok(ranks) => {
                self.attempts.remove(&Retry::Resolve(source.clone()));
                let mut infos = Vec::with_capacity(ranks.len());
                for entry in ranks {
                    let key = PeerKey { incarnation: entry.incarnation, direction: Direction::WeGrant };
                    if let Ok(address) = HostPort::parse(&entry.address, DEFAULT_PORT) {
                        self.peers.entry(key).or_default().address = Some(address);
                    }
                    infos.push(RankInfo {
                        incarnation: entry.incarnation,
                        side: Side { groups: entry.groups, shard: entry.shard },
                    });
                }
                self.node.handle_resolved(now, source, Ok(infos));
                self.directory.stale = true;
            }
            Err(missing) => {
                tracing::debug!(source = %source.address, %missing, "the directory is not complete yet");
                self.retry(now, Retry::Resolve(source.clone()));
            }
        }
    }

    /// Drops the addresses of ranks that the node does not know and no source of its names: an answer that it refused, or
    /// the other ranks of a source of which one has gone. Nothing else would ever tell us to forget them.
    pub(super) fn drop_stale_addresses(&mut self) {
        if std::mem::take(&mut self.directory.stale) {
            let known: HashSet<PeerKey> = self.node.known().collect();
            self.peers.retain(|key, io| known.contains(key) || !io.is_address_only());
        }
    }

    pub(super) fn directory_closed(&mut self, now: Time, conn: ConnId, kind: ConnKind, reason: Reason) {
        match kind {
            ConnKind::Accepted => {
                self.directory.visitors.remove(&conn);
                self.directory.entries.retain(|(c, _)| *c != conn);
            }
            ConnKind::Register => {
                if self.directory.registering == Some(conn) {
                    self.directory.registering = None;
                    if is_final(&reason) {
                        tracing::error!(%reason, "the directory refuses this agent; trying again");
                    }
                    self.retry(now, Retry::Register);
                }
            }
            ConnKind::Lookup(source) => {
                if self.directory.lookups.remove(&conn).is_some() {
                    if is_final(&reason) {
                        self.node.handle_resolved(now, &source, Err(reason));
                    } else {
                        self.retry(now, Retry::Resolve(source));
                    }
                }
            }
            ConnKind::Transfer(_) => {}
        }
    }
}

/// The ranks of the engine that the directory itself belongs to, in the order `pp_rank * tp_size + tp_rank`; or how
/// many are missing.
fn ranks_of(source: &Source, m: Entries) -> Result<Vec<Entry>, String> {
    let engine = m.entries.first().map(|e| e.engine.clone()).unwrap_or_default();
    let mut ranks: HashMap<(u32, u32), Entry> = HashMap::new();
    let mut size = None;
    for e in m.entries.into_iter().filter(|e| e.engine == engine && e.dp_rank == source.dp_rank) {
        let of = (e.shard.tp_size, e.shard.pp_size);
        if *size.get_or_insert(of) != of {
            return Err(format!("ranks of {engine} disagree on its size: {size:?} and {of:?}"));
        }
        ranks.insert((e.shard.pp_rank, e.shard.tp_rank), e);
    }
    let (tp, pp) =
        size.ok_or_else(|| format!("no rank of {engine} with data-parallel rank {}", source.dp_rank))?;
    let want = u64::from(tp) * u64::from(pp);
    if ranks.len() as u64 != want {
        return Err(format!("{} of {want} ranks of {engine} have registered", ranks.len()));
    }
    let mut ranks: Vec<Entry> = ranks.into_values().collect();
    ranks.sort_by_key(|e| (e.shard.pp_rank, e.shard.tp_rank));
    Ok(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvxfer_proto::{Incarnation, Shard};

    fn entry(engine: &str, dp: u32, tp_rank: u32, tp_size: u32) -> Entry {
        Entry {
            name: format!("{engine}-{dp}-{tp_rank}"),
            engine: engine.to_owned(),
            dp_rank: dp,
            incarnation: Incarnation(u64::from(dp * 100 + tp_rank)),
            groups: Vec::new(),
            shard: Shard { tp_rank, tp_size, pp_rank: 0, pp_size: 1 },
            address: "127.0.0.1:1".to_owned(),
        }
    }

    #[test]
    fn a_source_is_complete_when_every_rank_of_its_engine_is_there() {
        let source = Source { address: "x".into(), dp_rank: 1 };
        let mut entries =
            vec![entry("p", 0, 0, 2), entry("p", 0, 1, 2), entry("p", 1, 1, 2), entry("other", 1, 0, 2)];
        let err = ranks_of(&source, Entries { entries: entries.clone() }).unwrap_err();
        assert_eq!(err, "1 of 2 ranks of p have registered");
        entries.push(entry("p", 1, 0, 2));
        let ranks = ranks_of(&source, Entries { entries }).unwrap();
        assert_eq!(ranks.iter().map(|e| e.name.as_str()).collect::<Vec<_>>(), ["p-1-0", "p-1-1"]);
        assert!(ranks_of(&source, Entries { entries: Vec::new() }).is_err());
    }
}
