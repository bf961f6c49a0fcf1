//! What strangers and peers may use up, and who has used how much.

use super::conn::ConnId;
use kvxfer_proto::Incarnation;
use kvxfer_proto::wire::MAX_FRAME_BYTES;
use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::time::Duration;

/// What the control channel takes from others before it closes connections. Every number bounds memory, descriptors or
/// time that somebody else could otherwise use up; the state machine's own are in
/// [`kvxfer_proto::node::Config`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Connections in all; more are closed at once.
    pub connections: usize,
    /// Of those, accepted from one address (one `/64` of IPv6).
    pub connections_per_address: usize,
    /// Accepted connections with one authenticated peer (incarnation).
    pub connections_per_peer: usize,
    /// Accepted connections that have not passed their handshake; past it the oldest is closed, of the address that has
    /// most.
    pub handshakes: usize,
    /// The same for one address.
    pub handshakes_per_address: usize,
    /// A connection that has not passed its handshake by then is closed.
    pub handshake_timeout: Duration,
    /// Most bytes of a frame from an authenticated peer; at least [`Limits::LEAST_FRAME_BYTES`]. Others have
    /// `MAX_HANDSHAKE_BYTES`. An honest grant has four bytes a page: one above the limit would be resent for ever.
    pub frame_bytes: usize,
    /// A frame that has begun must be whole by then, with a second more for each MiB that it announces.
    pub frame_timeout: Duration,
    /// Bytes that may wait for a peer to read them.
    pub unread_bytes: usize,
    /// Pings, look-ups, registrations and attachments of one connection in a second, on average; ten times as many may
    /// come at once.
    pub requests_per_second: u32,
    /// Ranks in the directory.
    pub registrations: usize,
}

impl Limits {
    /// An honest peer's frames must pass: names, layouts, reasons, and the page lists of ordinary rooms.
    pub const LEAST_FRAME_BYTES: usize = 64 << 10;
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 16_384,
            connections_per_address: 4096,
            connections_per_peer: 64,
            handshakes: 256,
            handshakes_per_address: 128,
            handshake_timeout: Duration::from_secs(10),
            frame_bytes: MAX_FRAME_BYTES,
            frame_timeout: Duration::from_secs(10),
            unread_bytes: 256 << 20,
            requests_per_second: 50,
            registrations: 4096,
        }
    }
}

/// Where a connection comes from, as far as a limit can tell hosts apart.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) struct Origin(u128);

impl Origin {
    pub(super) fn of(ip: IpAddr) -> Self {
        match ip.to_canonical() {
            IpAddr::V4(ip) => Self(u128::from(u32::from(ip))),
            // A host has a whole /64 to choose its address from.
            IpAddr::V6(ip) => Self(u128::from(ip) >> 64 | 1 << 127),
        }
    }
}

/// Who has how many connections.
#[derive(Debug, Default)]
pub(super) struct Usage {
    by_origin: HashMap<Origin, usize>,
    by_peer: HashMap<Incarnation, usize>,
    /// Accepted connections in their handshake, oldest first.
    strangers: BTreeMap<ConnId, Origin>,
}

fn less<K: Copy + Eq + std::hash::Hash>(map: &mut HashMap<K, usize>, key: K) {
    if let Some(n) = map.get_mut(&key) {
        *n = n.saturating_sub(1);
        if *n == 0 {
            map.remove(&key);
        }
    }
}

impl Usage {
    pub(super) fn of_origin(&self, origin: Origin) -> usize {
        self.by_origin.get(&origin).copied().unwrap_or(0)
    }

    /// A connection was accepted. Returns the one that has to go for it, if one has; that one counts no more.
    pub(super) fn accepted(
        &mut self,
        limits: &Limits,
        id: ConnId,
        origin: Origin,
    ) -> Option<(ConnId, String)> {
        *self.by_origin.entry(origin).or_insert(0) += 1;
        self.strangers.insert(id, origin);
        let own = self.strangers.values().filter(|o| **o == origin).count();
        let what = "connections are in their handshake";
        let (whose, text) = if own > limits.handshakes_per_address {
            (origin, format!("more than {} {what} from one address", limits.handshakes_per_address))
        } else if self.strangers.len() > limits.handshakes {
            let mut count: BTreeMap<Origin, usize> = BTreeMap::new();
            for origin in self.strangers.values() {
                *count.entry(*origin).or_insert(0) += 1;
            }
            let (most, _) = count.into_iter().max_by_key(|(_, n)| *n)?;
            (most, format!("more than {} {what}", limits.handshakes))
        } else {
            return None;
        };
        let oldest = self.strangers.iter().find(|(_, o)| **o == whose).map(|(id, _)| *id)?;
        self.strangers.remove(&oldest);
        Some((oldest, text))
    }

    /// A connection passed its handshake, or is about to be removed.
    pub(super) fn no_stranger(&mut self, id: ConnId) {
        self.strangers.remove(&id);
    }

    /// Takes a place of this peer's; false if it has none left.
    pub(super) fn admit(&mut self, limits: &Limits, peer: Incarnation) -> bool {
        let n = self.by_peer.entry(peer).or_insert(0);
        let free = *n < limits.connections_per_peer;
        *n += usize::from(free);
        free
    }

    /// A connection is gone.
    pub(super) fn gone(&mut self, id: ConnId, origin: Option<Origin>, peer: Option<Incarnation>) {
        self.no_stranger(id);
        if let Some(origin) = origin {
            less(&mut self.by_origin, origin);
        }
        if let Some(peer) = peer {
            less(&mut self.by_peer, peer);
        }
    }
}

/// Requests that a connection may still make.
#[derive(Debug)]
pub(super) struct Allowance {
    /// In millionths of a request.
    left: u64,
    at_us: u64,
}

impl Allowance {
    const BURST: u64 = 10;

    pub(super) fn new(now_us: u64, per_second: u32) -> Self {
        Self { left: Self::full(per_second), at_us: now_us }
    }

    fn full(per_second: u32) -> u64 {
        u64::from(per_second).saturating_mul(Self::BURST * 1_000_000)
    }

    /// Whether one more is within the limit.
    pub(super) fn take(&mut self, now_us: u64, per_second: u32) -> bool {
        let earned = now_us.saturating_sub(self.at_us).saturating_mul(u64::from(per_second));
        self.at_us = now_us.max(self.at_us);
        self.left = self.left.saturating_add(earned).min(Self::full(per_second));
        let pays = self.left >= 1_000_000;
        self.left -= if pays { 1_000_000 } else { 0 };
        pays
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(text: &str) -> Origin {
        Origin::of(text.parse().unwrap())
    }

    #[test]
    fn an_address_is_known_in_every_form() {
        assert_eq!(origin("10.0.0.1"), origin("::ffff:10.0.0.1"));
        assert_ne!(origin("10.0.0.1"), origin("10.0.0.2"));
        assert_eq!(origin("2001:db8::1"), origin("2001:db8::ffff:2"), "one /64 is one host");
        assert_ne!(origin("2001:db8::1"), origin("2001:db8:0:1::1"));
        assert_ne!(origin("::1"), origin("0.0.0.1"));
    }

    #[test]
    fn a_flood_from_one_address_costs_only_its_own_connections() {
        let limits = Limits { handshakes: 8, handshakes_per_address: 6, ..Limits::default() };
        let mut usage = Usage::default();
        let (honest, hostile) = (origin("10.0.0.1"), origin("10.0.0.2"));
        for n in 0..3 {
            assert_eq!(usage.accepted(&limits, ConnId(n), honest), None);
        }
        // All at once, and their ends come later.
        let victims: Vec<ConnId> = (100..200)
            .filter_map(|n| usage.accepted(&limits, ConnId(n), hostile))
            .map(|(id, _)| id)
            .collect();
        assert_eq!(victims.len(), 95);
        for id in victims {
            assert!(id.0 >= 100, "an honest connection was closed for a hostile one");
            usage.gone(id, Some(hostile), None);
        }
        assert_eq!(usage.strangers.len(), 8);
        assert_eq!(usage.of_origin(honest), 3);
        assert_eq!(usage.of_origin(hostile), 5);
    }

    #[test]
    fn requests_are_paid_for_by_time() {
        let mut allowance = Allowance::new(0, 2);
        assert_eq!((0..100).filter(|_| allowance.take(0, 2)).count(), 20, "a burst");
        assert_eq!((0..100).filter(|_| allowance.take(1_000_000, 2)).count(), 2, "a second later");
        assert_eq!((0..100).filter(|_| allowance.take(u64::MAX, 2)).count(), 20, "never more than a burst");
    }

    #[test]
    fn a_peer_has_so_many_places_and_gets_them_back() {
        let limits = Limits { connections_per_peer: 2, ..Limits::default() };
        let mut usage = Usage::default();
        let peer = Incarnation(7);
        assert!(usage.admit(&limits, peer) && usage.admit(&limits, peer));
        assert!(!usage.admit(&limits, peer));
        assert!(usage.admit(&limits, Incarnation(8)), "another's places are its own");
        usage.gone(ConnId(1), None, Some(peer));
        assert!(usage.admit(&limits, peer));
    }
}
