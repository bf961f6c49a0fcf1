//! The numbers that name things.

use std::fmt;
use std::time::Duration;

/// Names one request's hand-off on every rank of both sides: a random 63-bit number.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Room(u64);

impl Room {
    /// The largest room number, 2^63 - 1.
    pub const MAX: u64 = (1 << 63) - 1;

    /// A room, if `raw` fits in 63 bits.
    #[must_use]
    pub const fn new(raw: u64) -> Option<Self> {
        if raw <= Self::MAX { Some(Self(raw)) } else { None }
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A random number that an agent draws when it starts. A restarted peer has a new one, and so is another peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Number of a control connection between two incarnations; a higher one voids the lower ones' unread bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct SessionNo(pub u64);

/// A grant's sequence number; it rises per peer and incarnation. Zero is never a grant.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Seq(pub u64);

/// Names a push on its agent. Rises by one for each push of the agent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct PushId(pub u64);

/// Monotonic time in microseconds since some start that only the caller knows.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub u64);

impl Time {
    /// This time plus `d`, at most the end of time.
    #[must_use]
    pub fn after(self, d: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(d.as_micros()).unwrap_or(u64::MAX)))
    }

    /// Microseconds from `earlier` to this time, zero if it is later.
    #[must_use]
    pub const fn since_us(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}
