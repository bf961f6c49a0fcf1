//! Peers that are no agents: raw sockets, handshakes driven by hand, and somebody in the middle.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use crate::support::{LIMIT, PAGES};
use kvxfer_proto::handshake::{Config, Established, Handshake, Outcome};
use kvxfer_proto::msg::{Describe, Entries, Entry, Frame, Lookup, Msg, Purpose, Role};
use kvxfer_proto::wire::{self, Decoded, Decoder, MAX_FRAME_BYTES};
use kvxfer_proto::{Incarnation, SessionNo, Side};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

pub fn dial(address: &str) -> TcpStream {
    let s = TcpStream::connect(address).unwrap();
    s.set_read_timeout(Some(LIMIT)).unwrap();
    s.set_write_timeout(Some(LIMIT)).unwrap();
    s.set_nodelay(true).unwrap();
    s
}

/// Drives a handshake over anything; what came after it stays in the decoder.
pub fn drive(h: &mut Handshake, stream: &mut (impl Read + Write), decoder: &mut Decoder) -> Option<Outcome> {
    let mut buf = [0u8; 4096];
    loop {
        while let Some(bytes) = h.poll_frame() {
            stream.write_all(&bytes).and_then(|()| stream.flush()).ok()?;
        }
        if let Some(outcome) = h.outcome() {
            return Some(outcome.clone());
        }
        match stream.read(&mut buf) {
            Ok(n) if n > 0 => {
                decoder.feed(&buf[..n]);
                h.handle_input(decoder);
            }
            _ => {
                h.handle_eof();
                return h.outcome().cloned();
            }
        }
    }
}

/// A peer that passed its handshake and may now misbehave.
pub struct Raw<S> {
    pub stream: S,
    pub decoder: Decoder,
    pub me: Incarnation,
    pub session: SessionNo,
}

impl<S: Read + Write> Raw<S> {
    /// Connects for a purpose that needs no description.
    pub fn initiate(
        mut stream: S,
        me: u64,
        purpose: Purpose,
        secret: Option<kvxfer_proto::handshake::Secret>,
        binding: Option<[u8; 32]>,
    ) -> (Self, Outcome) {
        let me = Incarnation(me);
        let mut h = Handshake::initiator(Config::new(me, nonce(me.0), secret), purpose, SessionNo(1));
        if let Some(binding) = binding {
            h.bind(binding);
        }
        let mut decoder = Decoder::new();
        let outcome = drive(&mut h, &mut stream, &mut decoder).expect("an outcome");
        decoder.set_cap(MAX_FRAME_BYTES);
        (Self { stream, decoder, me, session: SessionNo(1) }, outcome)
    }

    pub fn encode(&self, msg: Msg, number: u64) -> Vec<u8> {
        let mut out = Vec::new();
        wire::encode(&Frame { incarnation: self.me, session: self.session, number, msg }, &mut out).unwrap();
        out
    }

    pub fn send(&mut self, msg: Msg, number: u64) -> std::io::Result<()> {
        let bytes = self.encode(msg, number);
        self.stream.write_all(&bytes)?;
        self.stream.flush()
    }

    /// The next frame; `None` once the agent has closed.
    pub fn next(&mut self) -> Option<Frame> {
        let mut buf = [0u8; 4096];
        loop {
            if let Some(Decoded::Frame(frame)) = self.decoder.next_frame().unwrap() {
                return Some(frame);
            }
            match self.stream.read(&mut buf) {
                Ok(n) if n > 0 => self.decoder.feed(&buf[..n]),
                Err(e)
                    if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) =>
                {
                    panic!("the agent neither answers nor closes within {LIMIT:?}")
                }
                _ => return None,
            }
        }
    }

    /// Reads until the agent closes.
    pub fn until_closed(&mut self) -> Vec<Frame> {
        std::iter::from_fn(|| self.next()).collect()
    }
}

pub fn nonce(n: u64) -> [u8; 32] {
    let mut out = [3; 32];
    out[..8].copy_from_slice(&n.to_le_bytes());
    out
}

/// Begins a session of hand-offs as a decode rank that describes itself so. Returns what the agent says of itself, too.
pub fn transfer(address: &str, me: u64, mut ours: impl FnMut() -> Describe) -> (Raw<TcpStream>, Describe) {
    let mut stream = dial(address);
    let me = Incarnation(me);
    let mut h = Handshake::initiator(Config::new(me, nonce(me.0), None), Purpose::Transfer, SessionNo(1));
    let mut decoder = Decoder::new();
    let mut buf = [0u8; 4096];
    loop {
        if h.need_describe().is_some() {
            h.supply_describe(ours());
        }
        while let Some(bytes) = h.poll_frame() {
            stream.write_all(&bytes).unwrap();
        }
        if let Some(outcome) = h.outcome() {
            let theirs = established(outcome.clone()).describe.unwrap();
            decoder.set_cap(MAX_FRAME_BYTES);
            return (Raw { stream, decoder, me, session: SessionNo(1) }, *theirs);
        }
        let n = stream.read(&mut buf).unwrap();
        assert!(n > 0, "closed in the handshake");
        decoder.feed(&buf[..n]);
        h.handle_input(&mut decoder);
    }
}

/// A decode rank with the whole of such a side, without fabrics and staging.
pub fn decode_rank(name: String, side: &Side) -> Describe {
    Describe {
        name,
        engine: String::new(),
        dp_rank: 0,
        role: Role::Decode,
        mode: "push".to_owned(),
        groups: side.groups.clone(),
        shard: side.shard,
        pages: vec![PAGES],
        model: String::new(),
        regions: side.regions(&[PAGES]).unwrap(),
        fabrics: Vec::new(),
        received: 0,
        link_generation: 0,
        staging: (0, 0),
        process: Vec::new(),
    }
}

pub fn established(outcome: Outcome) -> Box<Established> {
    let Outcome::Established(e) = outcome else { panic!("{outcome:?}") };
    e
}

pub fn lookup<S: Read + Write>(peer: &mut Raw<S>) -> Entries {
    peer.send(Msg::Lookup(Lookup { engine: String::new() }), 0).unwrap();
    let Some(Frame { msg: Msg::Entries(entries), .. }) = peer.next() else { panic!("no entries") };
    entries
}

/// Serves one look-up: who asks is told these entries.
pub fn answer_lookup<S: Read + Write>(mut stream: S, binding: Option<[u8; 32]>, entries: Vec<Entry>) {
    let me = Incarnation(0xD1);
    let mut h = Handshake::acceptor(Config::new(me, nonce(me.0), None));
    if let Some(binding) = binding {
        h.bind(binding);
    }
    let mut decoder = Decoder::new();
    let outcome = drive(&mut h, &mut stream, &mut decoder).unwrap();
    let session = established(outcome).met.session;
    let mut raw = Raw { stream, decoder, me, session };
    assert!(matches!(raw.next().map(|f| f.msg), Some(Msg::Lookup(_))));
    raw.send(Msg::Entries(Entries { entries }), 0).unwrap();
    raw.until_closed();
}

/// What a man in the middle does to bytes: `true` is towards the agent that was dialled. `None` cuts the connection.
pub type Tamper = Box<dyn FnMut(bool, Vec<u8>) -> Option<Vec<u8>> + Send>;

/// Passes connections on to `target`, each through its own rule.
pub struct Proxy {
    pub address: String,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    pub fn start(target: &str, mut rule: impl FnMut(usize) -> Tamper + Send + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (target, stop) = (target.to_owned(), Arc::new(AtomicBool::new(false)));
        let stopping = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            for (n, client) in listener.incoming().flatten().enumerate() {
                if stopping.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(server) = TcpStream::connect(&target) else { continue };
                let rule = Arc::new(Mutex::new(rule(n)));
                for (from, to, there) in [(&client, &server, true), (&server, &client, false)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let rule = Arc::clone(&rule);
                    std::thread::spawn(move || {
                        let mut buf = [0u8; 16 << 10];
                        while let Ok(n) = from.read(&mut buf) {
                            if n == 0 {
                                break;
                            }
                            let changed = (rule.lock().unwrap())(there, buf[..n].to_vec());
                            let cut = changed.is_none();
                            if to.write_all(&changed.unwrap_or_default()).is_err() || cut {
                                let _ = from.shutdown(Shutdown::Both);
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        Self { address, stop, thread: Some(thread) }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(&self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
