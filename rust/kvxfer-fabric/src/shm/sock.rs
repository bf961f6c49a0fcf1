//! The Unix socket that descriptors cross.

use super::os_error;
use super::wire::FDS_A_PACKET;
use crate::FabricError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// Connections that the kernel queues for a source that is busy.
const BACKLOG: i32 = 512;

/// Who is at the other end, as the kernel knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Peer {
    pub(crate) pid: u32,
    pub(crate) uid: u32,
}

fn socket() -> Result<OwnedFd, FabricError> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
    .map_err(|e| os_error("socket", &e.to_string()))
}

fn address(name: &[u8]) -> Result<SocketAddrUnix, FabricError> {
    SocketAddrUnix::new_abstract_name(name)
        .map_err(|e| os_error("socket", &format!("an abstract name of {} bytes: {e}", name.len())))
}

pub(crate) fn listen(name: &[u8]) -> Result<OwnedFd, FabricError> {
    let fd = socket()?;
    rustix::net::bind(&fd, &address(name)?).map_err(|e| os_error("bind", &e.to_string()))?;
    rustix::net::listen(&fd, BACKLOG).map_err(|e| os_error("listen", &e.to_string()))?;
    Ok(fd)
}

/// Connects; `None` when the source's queue is full and it must be tried again.
pub(crate) fn connect(name: &[u8]) -> Result<Option<OwnedFd>, FabricError> {
    let fd = socket()?;
    match rustix::net::connect(&fd, &address(name)?) {
        Ok(()) => Ok(Some(fd)),
        Err(Errno::AGAIN) => Ok(None),
        Err(e) => Err(os_error("connect", &format!("to the source's shm socket: {e}; has the peer gone?"))),
    }
}

pub(crate) fn accept(listener: &OwnedFd) -> Result<Option<OwnedFd>, Errno> {
    match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(fd) => Ok(Some(fd)),
        Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
        Err(e) => Err(e),
    }
}

/// `SO_PEERCRED`. A process that has no number in our namespace shows as 0, which is an error here.
pub(crate) fn peer(fd: &OwnedFd) -> Result<Peer, FabricError> {
    let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = libc::socklen_t::try_from(size_of::<libc::ucred>()).unwrap_or(0);
    // SAFETY: the pointers are to live values of the size that `len` says, and the descriptor is open.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    if rc != 0 {
        return Err(os_error("SO_PEERCRED", &std::io::Error::last_os_error().to_string()));
    }
    match u32::try_from(cred.pid) {
        Ok(pid) if pid > 0 => Ok(Peer { pid, uid: cred.uid }),
        _ => Err(os_error(
            "SO_PEERCRED",
            "the peer has no process id here; it is in another pid namespace (another container): use ucx",
        )),
    }
}

/// Sends one packet. `Ok(false)` when the socket is full.
pub(crate) fn send(fd: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<bool, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_A_PACKET))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOMANYREFS);
    }
    match rustix::net::sendmsg(fd, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
        Ok(n) if n == bytes.len() => Ok(true),
        Ok(_) => Err(Errno::MSGSIZE),
        Err(Errno::AGAIN | Errno::INTR) => Ok(false),
        Err(e) => Err(e),
    }
}

/// What came off the socket.
#[derive(Debug)]
pub(crate) enum Received {
    /// Nothing yet.
    Nothing,
    /// The other end closed.
    End,
    /// A packet of this many bytes.
    Packet(usize),
}

/// Takes one packet without descriptors; any that a hostile peer sends along are closed by the kernel.
pub(crate) fn recv_plain(fd: &OwnedFd, buf: &mut [u8]) -> Result<Received, Errno> {
    match rustix::net::recv(fd, &mut *buf, RecvFlags::TRUNC | RecvFlags::DONTWAIT) {
        Ok((_, 0)) | Err(Errno::CONNRESET) => Ok(Received::End),
        Ok((_, n)) if n > buf.len() => Err(Errno::MSGSIZE),
        Ok((_, n)) => Ok(Received::Packet(n)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(Received::Nothing),
        Err(e) => Err(e),
    }
}

/// Takes one packet and its descriptors.
pub(crate) fn recv(fd: &OwnedFd, buf: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<Received, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_A_PACKET))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(
        fd,
        &mut [IoSliceMut::new(buf)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
    );
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    match got {
        Ok(msg) if msg.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) => Err(Errno::MSGSIZE),
        Ok(msg) if msg.bytes == 0 => Ok(Received::End),
        Ok(msg) => Ok(Received::Packet(msg.bytes)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(Received::Nothing),
        Err(Errno::CONNRESET) => Ok(Received::End),
        Err(e) => Err(e),
    }
}

/// Whether the process of a pidfd ended, or the other end of a socket closed.
pub(crate) fn any_ended(pidfd: &OwnedFd, sock: Option<&OwnedFd>) -> bool {
    let process = PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN);
    match sock {
        Some(s) => ready(&mut [process, PollFd::from_borrowed_fd(s.as_fd(), PollFlags::RDHUP)]),
        None => ready(&mut [process]),
    }
}

/// Whether the other end of a socket closed.
pub(crate) fn hung_up(sock: &OwnedFd) -> bool {
    ready(&mut [PollFd::from_borrowed_fd(sock.as_fd(), PollFlags::RDHUP)])
}

fn ready(fds: &mut [PollFd<'_>]) -> bool {
    let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
    // A failed poll counts as an end: what cannot be watched is not to be trusted.
    !matches!(poll(fds, Some(&zero)), Ok(0) | Err(Errno::INTR))
}
