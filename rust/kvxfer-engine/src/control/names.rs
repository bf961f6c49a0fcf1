//! Host names are looked up on a thread of their own: the system's resolver blocks.

use super::conn::ConnId;
use crate::address::HostPort;
use crate::primitive::Signal;
use rustix::fd::{AsFd, BorrowedFd};
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};

/// An answer of the resolver.
pub(super) type Answer = (ConnId, Result<Vec<SocketAddr>, String>);

#[derive(Debug)]
struct Inbox {
    answers: Mutex<Vec<Answer>>,
    signal: Signal,
}

/// Look-ups under way.
#[derive(Debug)]
pub(super) struct Names {
    inbox: Arc<Inbox>,
}

impl Names {
    pub(super) fn new() -> rustix::io::Result<Self> {
        Ok(Self { inbox: Arc::new(Inbox { answers: Mutex::new(Vec::new()), signal: Signal::new()? }) })
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.inbox.signal.as_fd()
    }

    pub(super) fn ask(&self, id: ConnId, address: HostPort) {
        let inbox = Arc::clone(&self.inbox);
        let work = move || {
            let answer = (address.host.as_str(), address.port)
                .to_socket_addrs()
                .map(Iterator::collect)
                .map_err(|e| format!("host {} cannot be resolved: {e}", address.host));
            inbox.answers.lock().unwrap_or_else(PoisonError::into_inner).push((id, answer));
            inbox.signal.raise();
        };
        if std::thread::Builder::new().name("kvxfer-names".to_owned()).spawn(work).is_err() {
            let why = Err("no thread could be had to resolve a host name".to_owned());
            self.inbox.answers.lock().unwrap_or_else(PoisonError::into_inner).push((id, why));
            self.inbox.signal.raise();
        }
    }

    pub(super) fn answers(&self) -> Vec<Answer> {
        self.inbox.signal.clear();
        std::mem::take(&mut *self.inbox.answers.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
