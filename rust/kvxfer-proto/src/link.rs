//! Exactly-once, in-order delivery of messages between two incarnations, across any number of sessions.
//!
//! A session is a TCP connection, and a connection can die with messages in it. Every message that changes a
//! room's fate is therefore numbered; it stays in the sender's outbox until it is acknowledged, and a new session
//! starts by saying how far each side had got. The machines above never see a loss, a repeat or a swap: a cancel
//! cannot overtake the grant that it voids.

use crate::error::{Reason, ReasonKind};
use crate::msg::Msg;
use std::collections::VecDeque;

/// Unacknowledged messages a link may hold before the peer counts as lost.
pub const OUTBOX_LIMIT: usize = 1 << 20;

/// How far a peer's generation may be ahead of ours; each fence is one, so no honest peer comes near.
pub(crate) const GENERATIONS_AHEAD: u64 = 1 << 32;

/// Received messages after which an acknowledgement is due at once.
const ACK_EVERY: u64 = 16;

/// What a received link number means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arrival {
    /// The next one: handle it.
    Fresh,
    /// Seen before: drop it.
    Duplicate,
}

/// How a session continues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Resume {
    /// Where the last one stopped.
    Resumed,
    /// The peer fenced us and started afresh: all that both knew of each other is void.
    PeerStartedAfresh,
}

/// One direction pair of numbered messages with one peer incarnation.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Link {
    /// Times this link was started afresh; both sides take the higher one.
    generation: u64,
    /// Highest number ever enqueued.
    enqueued: u64,
    /// Highest number that the peer has acknowledged.
    acked: u64,
    /// Highest number handed to the present session.
    handed: u64,
    /// Highest number ever handed to any session.
    ever_handed: u64,
    /// Messages `acked+1 ..= enqueued`; `None` was withdrawn before it was ever sent.
    outbox: VecDeque<Option<Msg>>,
    /// Highest number received in order.
    received: u64,
    /// Highest number that we acknowledged in this session.
    ack_sent: u64,
}

impl Link {
    /// Highest number received in order; goes into `Describe`.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received
    }

    /// How often this link was started afresh; goes into `Describe`.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether every message has been acknowledged.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.outbox.iter().all(Option::is_none)
    }

    /// For a checker that does the same on the other side.
    pub fn renumber_generations(&mut self, off: u64) {
        self.generation = self.generation.saturating_sub(off);
    }

    /// Whether anything was ever said on this link, either way.
    #[must_use]
    pub fn was_used(&self) -> bool {
        self.ever_handed > 0 || self.received > 0
    }

    /// How many messages wait to be sent or acknowledged.
    #[must_use]
    pub fn unacknowledged(&self) -> usize {
        self.outbox.len()
    }

    /// Queues a message and returns its number.
    ///
    /// # Errors
    /// When the peer has left [`OUTBOX_LIMIT`] messages unacknowledged.
    pub fn enqueue(&mut self, msg: Msg) -> Result<u64, Reason> {
        if self.outbox.len() >= OUTBOX_LIMIT {
            return Err(Reason::new(
                ReasonKind::PeerLost,
                format!("the peer has left {OUTBOX_LIMIT} control messages unacknowledged"),
            ));
        }
        self.enqueued += 1;
        self.outbox.push_back(Some(msg));
        Ok(self.enqueued)
    }

    /// Whether no session has carried this message yet: the peer cannot know it.
    #[must_use]
    pub fn is_unheard(&self, number: u64) -> bool {
        number > self.ever_handed && number <= self.enqueued
    }

    /// Withdraws a message that no session has carried yet. Returns whether it did: then the peer can never see it.
    pub fn withdraw(&mut self, number: u64) -> bool {
        if !self.is_unheard(number) {
            return false;
        }
        let Some(index) = number.checked_sub(self.acked + 1).and_then(|i| usize::try_from(i).ok()) else {
            return false;
        };
        let withdrawn = self.outbox.get_mut(index).is_some_and(|slot| slot.take().is_some());
        // At the tail it leaves no hole: numbers that nobody has seen are used again.
        while self.enqueued > self.ever_handed && self.outbox.back().is_some_and(Option::is_none) {
            self.outbox.pop_back();
            self.enqueued -= 1;
        }
        withdrawn
    }

    /// Whether [`Link::poll`] would give a message of this kind.
    #[must_use]
    pub fn next_is(&self, kind: impl Fn(&Msg) -> bool) -> bool {
        let next = self.handed.checked_sub(self.acked).and_then(|i| usize::try_from(i).ok());
        next.and_then(|i| self.outbox.get(i)).is_some_and(|msg| msg.as_ref().is_some_and(kind))
    }

    /// The next message for the present session.
    pub fn poll(&mut self) -> Option<(u64, Msg)> {
        if self.handed == self.enqueued {
            return None;
        }
        let index = usize::try_from(self.handed.checked_sub(self.acked)?).ok()?;
        // A withdrawn message leaves a hole; an empty message takes its place, so that numbers have no gaps.
        let msg = self.outbox.get(index)?.clone().unwrap_or(Msg::Ack(self.received));
        self.handed += 1;
        self.ever_handed = self.ever_handed.max(self.handed);
        Some((self.handed, msg))
    }

    /// A new session begins. `peer_received` and `peer_generation` are what the peer said in its `Describe`.
    ///
    /// With [`Resume::PeerStartedAfresh`] nothing has changed here: the caller has to fail its rooms with that
    /// peer, fence it, and then [`Link::restart`] in the peer's generation.
    ///
    /// # Errors
    /// When the peer claims to have received what was never sent.
    pub fn session_up(&mut self, peer_received: u64, peer_generation: u64) -> Result<Resume, Reason> {
        if peer_generation.saturating_sub(self.generation) > GENERATIONS_AHEAD {
            return Err(Reason::new(
                ReasonKind::ProtocolError,
                format!(
                    "the peer is in link generation {peer_generation}, and this side in {}",
                    self.generation
                ),
            ));
        }
        if peer_generation > self.generation {
            if self.was_used() {
                return Ok(Resume::PeerStartedAfresh);
            }
            // Nothing was ever said on this link: there is nothing to void.
            self.generation = peer_generation;
        }
        let resume_at = if peer_generation < self.generation { 0 } else { peer_received };
        if resume_at > self.ever_handed || resume_at < self.acked {
            return Err(Reason::new(
                ReasonKind::ProtocolError,
                format!(
                    "the peer says that it received message {resume_at}, but messages {} to {} are outstanding",
                    self.acked + 1,
                    self.enqueued
                ),
            ));
        }
        self.drop_until(resume_at);
        self.handed = resume_at;
        self.ack_sent = self.received;
        Ok(Resume::Resumed)
    }

    /// Starts afresh in this generation, after a fence: a later session must not resume what was before.
    pub fn restart(&mut self, generation: u64) {
        *self = Self { generation: self.generation.max(generation), ..Self::default() };
    }

    /// Messages that no acknowledgement covers, oldest first.
    pub fn pending(&self) -> impl Iterator<Item = &Msg> {
        self.outbox.iter().flatten()
    }

    /// For a checker: the same, to be renamed.
    pub fn pending_mut(&mut self) -> impl Iterator<Item = &mut Msg> {
        self.outbox.iter_mut().flatten()
    }

    /// For a checker: whether [`Link::forget_received`] would forget anything.
    pub(crate) fn remembers_received(&self, received: u64) -> bool {
        let many = usize::try_from(received.saturating_sub(self.acked)).unwrap_or(usize::MAX);
        self.outbox.iter().take(many).flatten().any(|msg| *msg != Msg::Ack(0))
    }

    /// For a checker: what the messages up to `received` said is forgotten, since the peer has them.
    pub(crate) fn forget_received(&mut self, received: u64) -> bool {
        let many = usize::try_from(received.saturating_sub(self.acked)).unwrap_or(usize::MAX);
        let mut any = false;
        for msg in self.outbox.iter_mut().take(many).flatten().filter(|msg| **msg != Msg::Ack(0)) {
            *msg = Msg::Ack(0);
            any = true;
        }
        any
    }

    /// For a checker: up to which number messages may be dropped for good, if the peer has received all up to
    /// `received`: it is never resumed from before there.
    pub(crate) fn settled(&self, received: u64) -> u64 {
        received.saturating_sub(1).min(self.handed)
    }

    /// For a checker: numbers begin again `sent` later for what we send, and `received` later for what we receive. What
    /// is dropped was received; that something is unacknowledged is kept.
    pub(crate) fn renumber(&mut self, sent: u64, received: u64) {
        let mut unacknowledged = false;
        while self.acked < sent {
            self.acked += 1;
            unacknowledged |= self.outbox.pop_front().flatten().is_some();
        }
        if unacknowledged && let Some(slot) = self.outbox.front_mut() {
            *slot = Some(Msg::Ack(0));
        }
        for n in [&mut self.acked, &mut self.handed, &mut self.ever_handed, &mut self.enqueued] {
            *n = n.saturating_sub(sent);
        }
        for n in [&mut self.received, &mut self.ack_sent] {
            *n = n.saturating_sub(received);
        }
    }

    /// For a checker: what only a session looks at, and the next one begins with anew, while there is none.
    pub(crate) fn forget_session(&mut self) {
        self.ack_sent = self.received;
        self.handed = self.ever_handed;
    }

    /// The peer has everything up to `number`.
    ///
    /// # Errors
    /// When that was never sent.
    pub fn handle_ack(&mut self, number: u64) -> Result<(), Reason> {
        if number > self.handed {
            return Err(Reason::new(
                ReasonKind::ProtocolError,
                format!("the peer acknowledged message {number}, but only {} were sent", self.handed),
            ));
        }
        self.drop_until(number);
        Ok(())
    }

    fn drop_until(&mut self, number: u64) {
        while self.acked < number {
            self.acked += 1;
            self.outbox.pop_front();
        }
    }

    /// A numbered message came.
    ///
    /// # Errors
    /// On a gap, which TCP and a correct peer cannot make.
    pub fn handle_number(&mut self, number: u64) -> Result<Arrival, Reason> {
        if number <= self.received {
            return Ok(Arrival::Duplicate);
        }
        if number != self.received + 1 {
            return Err(Reason::new(
                ReasonKind::ProtocolError,
                format!("message {number} came after message {}", self.received),
            ));
        }
        self.received = number;
        Ok(Arrival::Fresh)
    }

    /// An acknowledgement to send now: one is due after [`ACK_EVERY`] messages, or whenever `flush` asks for it.
    pub fn poll_ack(&mut self, flush: bool) -> Option<u64> {
        let behind = self.received - self.ack_sent;
        if behind >= ACK_EVERY || (flush && behind > 0) {
            self.ack_sent = self.received;
            return Some(self.received);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn withdrawn_message_never_leaves_and_leaves_no_gap() {
        let mut link = Link::default();
        let a = link.enqueue(Msg::Ping(1)).unwrap();
        let b = link.enqueue(Msg::Ping(2)).unwrap();
        assert!(link.withdraw(a));
        assert!(!link.withdraw(a));
        assert_eq!(link.poll(), Some((1, Msg::Ack(0))));
        assert_eq!(link.poll(), Some((2, Msg::Ping(2))));
        assert!(!link.withdraw(b), "a message that a session carried may have arrived");
    }

    #[test]
    fn messages_withdrawn_at_the_tail_leave_nothing() {
        let mut link = Link::default();
        let numbers: Vec<u64> = (0..4).map(|n| link.enqueue(Msg::Ping(n)).unwrap()).collect();
        link.poll();
        assert!(link.withdraw(numbers[2]));
        assert_eq!(link.unacknowledged(), 4, "a message follows it");
        assert!(link.withdraw(numbers[3]));
        assert!(!link.withdraw(numbers[0]));
        assert_eq!(link.unacknowledged(), 2);
        assert_eq!(link.enqueue(Msg::Ping(9)).unwrap(), 3, "no number is left out");
        assert_eq!((link.poll(), link.poll()), (Some((2, Msg::Ping(1))), Some((3, Msg::Ping(9)))));
    }

    #[test]
    fn wrong_acknowledgements_are_refused() {
        let mut link = Link::default();
        link.enqueue(Msg::Ping(1)).unwrap();
        assert!(link.handle_ack(1).is_err(), "nothing was handed to a session yet");
        link.poll();
        link.handle_ack(1).unwrap();
        assert!(link.session_up(7, 0).is_err());
        assert!(link.session_up(0, 0).is_err(), "the peer forgot what it had acknowledged");
    }

    #[test]
    fn a_peer_that_started_afresh_voids_the_link() {
        let mut link = Link::default();
        link.enqueue(Msg::Ping(1)).unwrap();
        assert_eq!(link.session_up(0, 2).unwrap(), Resume::Resumed, "nothing was said yet");
        assert_eq!(link.poll(), Some((1, Msg::Ping(1))));
        assert_eq!(link.session_up(0, 3).unwrap(), Resume::PeerStartedAfresh);
        assert!(!link.is_idle(), "void only once the caller has fenced");
        link.restart(3);
        assert!(link.is_idle());
        assert_eq!(link.generation(), 3);
    }

    proptest! {
        /// Whatever prefix of each session's bytes arrives, every message arrives once and in order.
        #[test]
        fn exactly_once_in_order_over_any_sessions(
            sessions in proptest::collection::vec((0usize..20, 0usize..30, any::<bool>()), 1..12)
        ) {
            let (mut a, mut b) = (Link::default(), Link::default());
            let mut next = 0u64;
            let mut got = Vec::new();
            let run = |a: &mut Link, b: &mut Link, got: &mut Vec<u64>, arrive: usize, ack: bool| {
                a.session_up(b.received(), b.generation()).unwrap();
                let mut wire = Vec::new();
                while let Some(m) = a.poll() { wire.push(m); }
                for (n, msg) in wire.into_iter().take(arrive) {
                    if b.handle_number(n).unwrap() == Arrival::Fresh && let Msg::Ping(p) = msg {
                        got.push(p);
                    }
                    if ack && let Some(n) = b.poll_ack(false) { a.handle_ack(n).unwrap(); }
                }
            };
            for (send, arrive, ack) in sessions {
                for _ in 0..send { a.enqueue(Msg::Ping(next)).unwrap(); next += 1; }
                run(&mut a, &mut b, &mut got, arrive, ack);
            }
            run(&mut a, &mut b, &mut got, usize::MAX, true);
            prop_assert_eq!(got, (0..next).collect::<Vec<_>>());
        }
    }
}
