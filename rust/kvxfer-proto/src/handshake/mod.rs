//! How two agents meet: versions, proof of the secret, and what each may know of the other.
//!
//! ```text
//! initiator (decode)                       acceptor (prefill)
//!   Hello {versions, nonce, purpose, session} ->
//!                                     <- Challenge {version, nonce}
//!   Proof = MAC("kvxfer-1 initiator", Hello, Challenge) ->
//!                                     <- Accept = MAC("kvxfer-1 acceptor", Hello, Challenge, Proof)
//!   Describe ->                       <- Describe        (only for transfers)
//! ```
//!
//! The proofs cover the exact bytes of the frames before them, headers included: both incarnations, both nonces, both
//! sides' versions and features. A changed, replayed, reflected or downgraded frame gives another MAC. Nothing about
//! layouts, addresses or keys is sent before the peer has proved itself. Without a secret the key is empty: then the
//! MAC is a mere checksum, and [`Met::authenticated`] says so.
//!
//! The handshake authenticates the peer, not each later byte: whoever can change bytes of a connection
//! between two honest agents can change frames after it. That is what TLS is for; over it, the proofs also cover the
//! channel ([`Handshake::bind`]).

mod auth;
mod fit;

pub use auth::Secret;
pub use fit::fit;

use crate::error::{Reason, ReasonKind};
use crate::ids::{Incarnation, SessionNo};
use crate::msg::{Challenge, Describe, Frame, Hello, Msg, Proof, Purpose, VERSION};
use crate::wire::{
    self, Decoded, Decoder, MAX_DESCRIBE_BYTES, MAX_FRAME_BYTES, MAX_HANDSHAKE_BYTES, WireError,
};
use std::collections::VecDeque;

const SECRET_HELP: &str = "give both agents the same secret (argument `secret`, or the environment's \
                           KVXFER_SECRET_FILE or KVXFER_SECRET)";

/// What this side brings to every handshake, and the nonce for this one.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// This agent's incarnation.
    pub incarnation: Incarnation,
    /// Random bytes, fresh for each handshake.
    pub nonce: [u8; 32],
    /// Lowest and highest wire version that this agent speaks.
    pub versions: (u8, u8),
    /// Feature bits of this agent.
    pub features: u64,
    /// The shared secret, if there is one.
    pub secret: Option<Secret>,
}

impl Config {
    /// A configuration with this build's versions and no features.
    #[must_use]
    pub fn new(incarnation: Incarnation, nonce: [u8; 32], secret: Option<Secret>) -> Self {
        Self { incarnation, nonce, versions: (VERSION, VERSION), features: 0, secret }
    }
}

/// A peer that has proved itself (or need not, without a secret), and the session with it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Met {
    /// The peer's incarnation.
    pub incarnation: Incarnation,
    /// The session. Whether it is higher than the pair's last one is for the caller to check.
    pub session: SessionNo,
    /// The wire version that both speak.
    pub version: u8,
    /// Features that both have.
    pub features: u64,
    /// What the connection is for.
    pub purpose: Purpose,
    /// Whether a secret was proved; false if neither side has one.
    pub authenticated: bool,
}

impl Met {
    /// Checks that a frame comes from this peer's incarnation and belongs to this session.
    ///
    /// # Errors
    /// A stale frame, with both numbers; drop it, count it and close the connection.
    pub fn check(&self, frame: &Frame) -> Result<(), Reason> {
        self.check_ids(frame.incarnation, frame.session)
    }

    /// The same for a frame whose message this version does not know.
    ///
    /// # Errors
    /// As [`Met::check`].
    pub fn check_ids(&self, incarnation: Incarnation, session: SessionNo) -> Result<(), Reason> {
        if incarnation == self.incarnation && session == self.session {
            return Ok(());
        }
        Err(Reason::new(
            ReasonKind::ProtocolError,
            format!(
                "stale frame: incarnation {incarnation} session {}, this connection is incarnation {} session {}",
                session.0, self.incarnation, self.session.0
            ),
        ))
    }
}

/// A finished handshake.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Established {
    /// The peer and the session.
    pub met: Met,
    /// What the peer said of itself; there for [`Purpose::Transfer`] only.
    pub describe: Option<Box<Describe>>,
}

impl Established {
    /// As [`Met::check`].
    ///
    /// # Errors
    /// As [`Met::check`].
    pub fn check(&self, frame: &Frame) -> Result<(), Reason> {
        self.met.check(frame)
    }
}

/// How a handshake ended.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Outcome {
    /// The peers know and fit each other. A `Refuse` can still come, from a peer that checks more than this one.
    Established(Box<Established>),
    /// The peers know each other and do not fit. The connection may stay open for `RoomFailed` only; the peer's own
    /// `Refuse` may come in it too and says nothing new.
    Refused {
        /// The field and both values.
        reason: Reason,
        /// The peer and the session.
        met: Met,
    },
    /// Send what [`Handshake::poll_frame`] still has, then close the connection.
    Failed(Reason),
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Part {
    Initiator,
    Acceptor,
}

impl Part {
    /// Names of the peer and of this side.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Initiator => ("acceptor", "initiator"),
            Self::Acceptor => ("initiator", "acceptor"),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Phase {
    Hello,
    Challenge,
    Proof,
    Accept,
    Describe { met: Met, ours: Option<Box<Describe>>, theirs: Option<Box<Describe>> },
    Over(Outcome),
}

impl Phase {
    const fn awaits(&self) -> &'static str {
        match self {
            Self::Hello => "Hello",
            Self::Challenge => "Challenge",
            Self::Proof => "Proof",
            Self::Accept => "Accept",
            Self::Describe { .. } => "Describe",
            Self::Over(_) => "nothing",
        }
    }
}

/// One side of one handshake. Bytes go in through [`handle_input`](Self::handle_input), encoded frames come out of
/// [`poll_frame`](Self::poll_frame); when [`need_describe`](Self::need_describe) says so, supply a `Describe`; when
/// [`outcome`](Self::outcome) is there it is over. Timeouts are the caller's: see [`abort`](Self::abort).
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Handshake {
    config: Config,
    part: Part,
    phase: Phase,
    purpose: Purpose,
    session: SessionNo,
    version: u8,
    features: u64,
    /// The peer's incarnation, from its first frame.
    peer: Option<Incarnation>,
    /// Exact bytes of the frames that the next proof covers.
    transcript: Vec<u8>,
    /// What else they cover.
    channel: Option<[u8; 32]>,
    out: VecDeque<Vec<u8>>,
}

impl Handshake {
    /// The side that opened the connection. `session` rises from connection to connection with the same peer, from 1.
    #[must_use]
    pub fn initiator(config: Config, purpose: Purpose, session: SessionNo) -> Self {
        let mut this = Self::start(config, Part::Initiator, Phase::Challenge, purpose, session);
        let hello = Hello {
            versions: this.config.versions,
            features: this.config.features,
            nonce: this.config.nonce,
            purpose,
            session,
        };
        this.send_covered(SessionNo(0), Msg::Hello(hello));
        this
    }

    /// The side that was connected to.
    #[must_use]
    pub fn acceptor(config: Config) -> Self {
        Self::start(config, Part::Acceptor, Phase::Hello, Purpose::Transfer, SessionNo(0))
    }

    fn start(config: Config, part: Part, phase: Phase, purpose: Purpose, session: SessionNo) -> Self {
        let version = config.versions.1;
        Self {
            config,
            part,
            phase,
            purpose,
            session,
            version,
            features: 0,
            peer: None,
            transcript: Vec::new(),
            channel: None,
            out: VecDeque::new(),
        }
    }

    /// Takes frames out of `decoder` until the handshake is over or waits for more bytes, with the cap that each phase
    /// allows. What follows the handshake stays in `decoder`.
    pub fn handle_input(&mut self, decoder: &mut Decoder) {
        decoder.set_cap(self.frame_cap());
        while self.outcome().is_none() {
            match decoder.next_raw() {
                Ok(Some(raw)) => self.handle_frame(raw),
                Ok(None) => return,
                Err(e) => self.handle_error(&e, decoder.pending()),
            }
            decoder.set_cap(self.frame_cap());
        }
    }

    /// Takes one frame's exact bytes, header included: the proofs cover bytes, also of fields unknown to this version.
    pub fn handle_frame(&mut self, raw: &[u8]) {
        if self.outcome().is_some() {
            return;
        }
        match wire::decode_frame(raw) {
            Ok(Decoded::Frame(frame)) => {
                if let Err(reason) = self.step(frame, raw) {
                    self.abort(reason);
                }
            }
            // A newer minor peer may say more than this one understands, but only once it is authenticated.
            Ok(Decoded::Unknown(_)) if matches!(self.phase, Phase::Describe { .. }) => {}
            Ok(Decoded::Unknown(header)) => {
                let text =
                    format!("frame of unknown kind {} where {} belongs", header.kind, self.phase.awaits());
                self.broken(&text, raw);
            }
            Err(e) => self.handle_error(&e, raw),
        }
    }

    /// The connection ended.
    pub fn handle_eof(&mut self) {
        if self.outcome().is_none() {
            let text = format!(
                "the peer closed the connection in the handshake, before its {}",
                self.phase.awaits()
            );
            self.phase = Phase::Over(Outcome::Failed(Reason::new(ReasonKind::PeerLost, text)));
        }
    }

    /// Ends the handshake from this side, for example because time is up: the peer is told, nothing is established.
    /// Does nothing if it is over.
    pub fn abort(&mut self, reason: Reason) {
        if self.outcome().is_some() {
            return;
        }
        let session = match self.phase {
            Phase::Hello | Phase::Challenge => SessionNo(0),
            _ => self.session,
        };
        // A reason's text is cut to fit, so this cannot fail; if it did, the peer would see the connection close.
        drop(self.send(session, Msg::Refuse(reason.clone())));
        self.phase = Phase::Over(Outcome::Failed(reason));
    }

    /// The text for a peer where one side has TLS and the other has none. Both sides read it.
    #[must_use]
    pub fn tls_differs(&self, here: bool) -> String {
        let (peer, this) = self.part.names();
        let (with, without) = if here { (this, peer) } else { (peer, this) };
        format!(
            "authentication failed: tls differs: the {with} has TLS and the {without} has none; give both agents \
             `tls` with certificates of one authority, or neither"
        )
    }

    /// Binds the proofs to the channel that carries this handshake (for TLS: its exported key), so that whoever sits
    /// between two channels cannot pass the proofs on. Before the first input; both sides or none.
    pub fn bind(&mut self, channel: [u8; 32]) {
        self.channel = Some(channel);
    }

    /// The next encoded frame to send.
    pub fn poll_frame(&mut self) -> Option<Vec<u8>> {
        self.out.pop_front()
    }

    /// The authenticated peer for which [`supply_describe`](Self::supply_describe) is due, if it is.
    #[must_use]
    pub fn need_describe(&self) -> Option<&Met> {
        match &self.phase {
            Phase::Describe { met, ours: None, .. } => Some(met),
            _ => None,
        }
    }

    /// Says what the peer may know of this side. Does nothing unless [`need_describe`](Self::need_describe).
    pub fn supply_describe(&mut self, describe: Describe) {
        if self.need_describe().is_none() {
            return;
        }
        let describe = Box::new(describe);
        if let Err(e) = self.send(self.session, Msg::Describe(describe.clone())) {
            self.abort(Reason::new(ReasonKind::Internal, format!("cannot describe this agent: {e}")));
            return;
        }
        if let Phase::Describe { ours, .. } = &mut self.phase {
            *ours = Some(describe);
        }
        self.conclude();
    }

    /// How it ended, if it has.
    #[must_use]
    pub fn outcome(&self) -> Option<&Outcome> {
        match &self.phase {
            Phase::Over(outcome) => Some(outcome),
            _ => None,
        }
    }

    /// How it ended, or the handshake back if it has not. Take the frames that are left first.
    ///
    /// # Errors
    /// The handshake, which goes on.
    pub fn into_outcome(self) -> Result<Outcome, Box<Self>> {
        match self.phase {
            Phase::Over(outcome) => Ok(outcome),
            _ => Err(Box::new(self)),
        }
    }

    /// Most bytes after the header that a frame may have now.
    #[must_use]
    pub fn frame_cap(&self) -> usize {
        match &self.phase {
            Phase::Describe { .. } => MAX_DESCRIBE_BYTES,
            Phase::Over(Outcome::Established(_)) => MAX_FRAME_BYTES,
            _ => MAX_HANDSHAKE_BYTES,
        }
    }

    fn send(&mut self, session: SessionNo, msg: Msg) -> Result<&[u8], WireError> {
        let frame = Frame { incarnation: self.config.incarnation, session, number: 0, msg };
        let mut raw = Vec::new();
        wire::encode(&frame, &mut raw)?;
        self.out.push_back(raw);
        Ok(self.out.back().map(Vec::as_slice).unwrap_or_default())
    }

    /// Sends a frame that later proofs cover. Only for frames of fixed size, which always fit.
    fn send_covered(&mut self, session: SessionNo, msg: Msg) {
        let raw = self.send(session, msg).map(<[u8]>::to_vec).unwrap_or_default();
        self.transcript.extend_from_slice(&raw);
    }

    fn handle_error(&mut self, e: &WireError, bytes: &[u8]) {
        self.broken(&e.to_string(), bytes);
    }

    fn broken(&mut self, what: &str, bytes: &[u8]) {
        const SHOWN: usize = 16;
        if matches!(self.phase, Phase::Hello | Phase::Challenge) && wire::looks_like_tls(bytes) == Some(true)
        {
            self.abort(auth(self.tls_differs(false)));
            return;
        }
        let text = if matches!(self.phase, Phase::Hello | Phase::Challenge) {
            let start = bytes.get(..SHOWN).unwrap_or(bytes).escape_ascii();
            format!(
                "the peer is not kvxfer: its first bytes are \"{start}\" ({what}); check the address and port"
            )
        } else {
            format!("control channel: {what}")
        };
        self.abort(Reason::new(ReasonKind::ProtocolError, text));
    }

    fn step(&mut self, frame: Frame, raw: &[u8]) -> Result<(), Reason> {
        if frame.incarnation == self.config.incarnation {
            return Err(auth(format!(
                "authentication failed: the peer has this agent's own incarnation {}; an agent cannot connect to \
                 itself, and its own frames prove nothing",
                frame.incarnation
            )));
        }
        // Before the peer has proved itself, who says that it refuses makes no difference.
        if let (Msg::Refuse(reason), false) = (&frame.msg, matches!(self.phase, Phase::Describe { .. })) {
            self.refused(reason);
            return Ok(());
        }
        if frame.number != 0 {
            return Err(protocol(format!("numbered frame ({}) in the handshake", frame.number)));
        }
        let session = match self.phase {
            Phase::Hello | Phase::Challenge => SessionNo(0),
            _ => self.session,
        };
        let incarnation = self.peer.unwrap_or(frame.incarnation);
        if (frame.incarnation, frame.session) != (incarnation, session) {
            return Err(auth(format!(
                "authentication failed: frame of incarnation {} session {} in a handshake of incarnation {incarnation} \
                 session {}",
                frame.incarnation, frame.session.0, session.0
            )));
        }
        self.peer = Some(incarnation);
        match (&self.phase, frame.msg) {
            (Phase::Hello, Msg::Hello(hello)) => self.on_hello(&hello, raw),
            (Phase::Challenge, Msg::Challenge(challenge)) => self.on_challenge(&challenge, raw),
            (Phase::Proof, Msg::Proof(proof)) => self.on_proof(&proof, raw, incarnation),
            (Phase::Accept, Msg::Accept(proof)) => {
                self.check_proof(auth::ACCEPTOR, &proof)?;
                self.authenticated(incarnation);
                Ok(())
            }
            (Phase::Describe { theirs: None, .. }, Msg::Describe(describe)) => {
                if let Phase::Describe { theirs, .. } = &mut self.phase {
                    *theirs = Some(describe);
                }
                self.conclude();
                Ok(())
            }
            (Phase::Describe { .. }, Msg::Refuse(reason)) => {
                self.refused(&reason);
                Ok(())
            }
            (phase @ (Phase::Proof | Phase::Accept), msg) => {
                Err(auth(format!("authentication failed: {} where {} belongs", msg.name(), phase.awaits())))
            }
            (phase, msg) => Err(protocol(format!("{} where {} belongs", msg.name(), phase.awaits()))),
        }
    }

    fn on_hello(&mut self, hello: &Hello, raw: &[u8]) -> Result<(), Reason> {
        self.check_nonce(&hello.nonce)?;
        if hello.session.0 == 0 {
            return Err(protocol("session number 0 in Hello; sessions count from 1".to_owned()));
        }
        let ((low, high), (our_low, our_high)) = (hello.versions, self.config.versions);
        let version = high.min(our_high);
        if version < low.max(our_low) {
            return Err(Reason::new(
                ReasonKind::VersionMismatch,
                format!(
                    "no common wire version: the initiator speaks {low} to {high}, the acceptor {our_low} to {our_high}; \
                     update the older of the two"
                ),
            ));
        }
        (self.version, self.features) = (version, hello.features & self.config.features);
        (self.purpose, self.session) = (hello.purpose, hello.session);
        self.transcript.extend_from_slice(raw);
        let challenge = Challenge { version, features: self.config.features, nonce: self.config.nonce };
        self.send_covered(SessionNo(0), Msg::Challenge(challenge));
        self.phase = Phase::Proof;
        Ok(())
    }

    fn on_challenge(&mut self, challenge: &Challenge, raw: &[u8]) -> Result<(), Reason> {
        self.check_nonce(&challenge.nonce)?;
        let (low, high) = self.config.versions;
        if !(low..=high).contains(&challenge.version) {
            return Err(Reason::new(
                ReasonKind::VersionMismatch,
                format!(
                    "the acceptor chose wire version {}, the initiator speaks {low} to {high}; update the older of the \
                     two",
                    challenge.version
                ),
            ));
        }
        (self.version, self.features) = (challenge.version, challenge.features & self.config.features);
        self.transcript.extend_from_slice(raw);
        let mac = auth::prove(
            self.config.secret.as_ref(),
            auth::INITIATOR,
            &self.transcript,
            self.channel.as_ref(),
        );
        self.send_covered(self.session, Msg::Proof(Proof { mac }));
        self.phase = Phase::Accept;
        Ok(())
    }

    fn on_proof(&mut self, proof: &Proof, raw: &[u8], incarnation: Incarnation) -> Result<(), Reason> {
        self.check_proof(auth::INITIATOR, proof)?;
        self.transcript.extend_from_slice(raw);
        let mac =
            auth::prove(self.config.secret.as_ref(), auth::ACCEPTOR, &self.transcript, self.channel.as_ref());
        self.send_covered(self.session, Msg::Accept(Proof { mac }));
        self.authenticated(incarnation);
        Ok(())
    }

    /// The peer's nonce must not be ours: a reflected one would make our own proof valid for the peer.
    fn check_nonce(&self, nonce: &[u8; 32]) -> Result<(), Reason> {
        if *nonce == self.config.nonce {
            return Err(auth("authentication failed: the peer sent this agent's own nonce back".to_owned()));
        }
        Ok(())
    }

    fn check_proof(&self, label: &[u8], proof: &Proof) -> Result<(), Reason> {
        let secret = self.config.secret.as_ref();
        let channel = self.channel.as_ref();
        if auth::verify(secret, label, &self.transcript, channel, &proof.mac) {
            return Ok(());
        }
        let (peer, this) = self.part.names();
        // Both sides read this text, so it names sides, not "you" and "me".
        Err(auth(if secret.is_none() {
            format!(
                "authentication failed: the {this} has no secret, and the {peer}'s proof does not verify without one; {SECRET_HELP}"
            )
        } else if auth::verify(None, label, &self.transcript, channel, &proof.mac) {
            format!("authentication failed: the {this} has a secret and the {peer} has none; {SECRET_HELP}")
        } else {
            format!(
                "authentication failed: the {peer}'s proof does not match the {this}'s secret; {SECRET_HELP}"
            )
        }))
    }

    fn authenticated(&mut self, incarnation: Incarnation) {
        self.transcript = Vec::new();
        let met = Met {
            incarnation,
            session: self.session,
            version: self.version,
            features: self.features,
            purpose: self.purpose,
            authenticated: self.config.secret.is_some(),
        };
        self.phase = match self.purpose {
            Purpose::Transfer => Phase::Describe { met, ours: None, theirs: None },
            Purpose::Lookup | Purpose::Register => {
                Phase::Over(Outcome::Established(Box::new(Established { met, describe: None })))
            }
        };
    }

    /// Ends the handshake once both sides have described themselves.
    fn conclude(&mut self) {
        let Phase::Describe { met, ours: Some(ours), theirs: Some(theirs) } = &self.phase else { return };
        let (src, dst) = match self.part {
            Part::Initiator => (theirs, ours),
            Part::Acceptor => (ours, theirs),
        };
        let met = *met;
        let outcome = match fit(src, dst) {
            Ok(()) => Outcome::Established(Box::new(Established { met, describe: Some(theirs.clone()) })),
            Err(text) => {
                let reason = Reason::new(ReasonKind::LayoutMismatch, text);
                drop(self.send(self.session, Msg::Refuse(reason.clone())));
                Outcome::Refused { reason, met }
            }
        };
        self.phase = Phase::Over(outcome);
    }

    /// The peer refuses. Until it has proved itself its word counts for this connection only.
    fn refused(&mut self, reason: &Reason) {
        // Whoever wrote this text may be anybody: nothing of it may steer a terminal or a log.
        let text: String = reason.text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
        self.phase = Phase::Over(match (&self.phase, reason.kind) {
            (Phase::Describe { met, .. }, ReasonKind::LayoutMismatch) => {
                Outcome::Refused { reason: Reason::new(reason.kind, text), met: *met }
            }
            _ => Outcome::Failed(Reason::new(reason.kind, format!("refused by the peer: {text}"))),
        });
    }
}

fn auth(text: String) -> Reason {
    Reason::new(ReasonKind::AuthError, text)
}

fn protocol(text: String) -> Reason {
    Reason::new(ReasonKind::ProtocolError, text)
}
