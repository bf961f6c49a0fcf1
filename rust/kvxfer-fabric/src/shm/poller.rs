//! One epoll descriptor over everything that the fabric waits for.

use super::os_error;
use crate::FabricError;
use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// How long to wait before what failed for want of room is tried again.
const RETRY_NS: i64 = 2_000_000;
/// Events that one call takes.
pub(crate) const EVENTS: usize = 64;

/// What an event is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Subject {
    /// Readers want to attach.
    Listener,
    /// Time to try again.
    Timer,
    /// An accepted connection.
    Conn(u32),
    /// The socket of an active endpoint.
    Sock(u32),
    /// The process behind an endpoint ended.
    Process(u32),
}

impl Subject {
    fn encode(self) -> EventData {
        let (tag, key) = match self {
            Self::Listener => (0, 0),
            Self::Timer => (1, 0),
            Self::Conn(k) => (2, k),
            Self::Sock(k) => (3, k),
            Self::Process(k) => (4, k),
        };
        EventData::new_u64((tag << 32) | u64::from(key))
    }

    fn decode(data: u64) -> Option<Self> {
        let key = u32::try_from(data & u64::from(u32::MAX)).ok()?;
        Some(match data >> 32 {
            0 => Self::Listener,
            1 => Self::Timer,
            2 => Self::Conn(key),
            3 => Self::Sock(key),
            4 => Self::Process(key),
            _ => return None,
        })
    }
}

#[derive(Debug)]
pub(crate) struct Poller {
    epoll: OwnedFd,
    timer: OwnedFd,
    armed: bool,
}

impl Poller {
    pub(crate) fn new() -> Result<Self, FabricError> {
        let epoll =
            epoll::create(CreateFlags::CLOEXEC).map_err(|e| os_error("epoll_create1", &e.to_string()))?;
        let timer = rustix::time::timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )
        .map_err(|e| os_error("timerfd_create", &e.to_string()))?;
        let poller = Self { epoll, timer, armed: false };
        poller.add(&poller.timer, Subject::Timer)?;
        Ok(poller)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Watches for input and for the end.
    pub(crate) fn add(&self, fd: impl AsFd, subject: Subject) -> Result<(), FabricError> {
        epoll::add(&self.epoll, fd, subject.encode(), EventFlags::IN)
            .map_err(|e| os_error("epoll_ctl", &e.to_string()))
    }

    /// Watches for room to send as well, or no longer.
    pub(crate) fn want_room(&self, fd: impl AsFd, subject: Subject, room: bool) -> Result<(), FabricError> {
        let flags = if room { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
        epoll::modify(&self.epoll, fd, subject.encode(), flags)
            .map_err(|e| os_error("epoll_ctl", &e.to_string()))
    }

    /// Stops watching; needed before a descriptor is closed that a forked child may still hold.
    pub(crate) fn remove(&self, fd: impl AsFd) {
        // It fails only if the descriptor is not there, which is what is wanted.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Makes the timer fire soon.
    pub(crate) fn retry_soon(&mut self) {
        self.set_timer(RETRY_NS);
    }

    fn set_timer(&mut self, ns: i64) {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let spec = Itimerspec { it_interval: zero, it_value: Timespec { tv_sec: 0, tv_nsec: ns } };
        if self.armed == (ns > 0) {
            return;
        }
        match rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec) {
            Ok(_) => self.armed = ns > 0,
            Err(error) => tracing::warn!(%error, "timerfd_settime failed"),
        }
    }

    /// Takes the timer's event.
    pub(crate) fn timer_fired(&mut self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(&self.timer, &mut count);
        self.armed = false;
    }

    /// What happened, without waiting. Returns how many of `out` are filled.
    pub(crate) fn poll(&self, out: &mut [Option<Subject>; EVENTS]) -> usize {
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let empty = Event { flags: EventFlags::empty(), data: EventData::new_u64(u64::MAX) };
        let mut events = [empty; EVENTS];
        match epoll::wait(&self.epoll, &mut events[..], Some(&zero)) {
            Ok(n) => {
                for (slot, event) in out.iter_mut().zip(events.iter().take(n)) {
                    // The event is packed, so its fields are copied out.
                    let data = event.data;
                    *slot = Subject::decode(data.u64());
                }
                n.min(EVENTS)
            }
            Err(rustix::io::Errno::INTR) => 0,
            Err(error) => {
                tracing::error!(%error, "epoll_wait failed");
                0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_keep_their_keys() {
        for s in [
            Subject::Listener,
            Subject::Timer,
            Subject::Conn(0),
            Subject::Sock(u32::MAX),
            Subject::Process(7),
        ] {
            assert_eq!(Subject::decode(s.encode().u64()), Some(s));
        }
        assert_eq!(Subject::decode(u64::MAX), None);
    }
}
