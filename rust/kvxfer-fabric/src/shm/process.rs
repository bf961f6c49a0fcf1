//! Watching another process.

use super::{host, os_error, sock};
use crate::FabricError;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::os::fd::OwnedFd;

/// A descriptor that becomes readable when the process with this id *and* start time ends; `None` if it has ended.
pub(crate) fn watch(pid: u32, start: u64) -> Result<Option<OwnedFd>, FabricError> {
    let Some(raw) = i32::try_from(pid).ok().filter(|p| *p > 0).and_then(Pid::from_raw) else {
        return Ok(None);
    };
    let fd = match pidfd_open(raw, PidfdFlags::empty()) {
        Ok(fd) => fd,
        Err(Errno::SRCH | Errno::INVAL) => return Ok(None),
        Err(e) => {
            return Err(os_error("pidfd_open", &format!("process {pid}: {e}; Linux 5.3 or newer is needed")));
        }
    };
    // The order matters: if the process behind the descriptor still lives after its start time was read, then
    // the time read was its own and not that of a later process with the same id.
    let same = host::start_time(pid) == Some(start);
    Ok((same && !sock::any_ended(&fd, None)).then_some(fd))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recycled_ids_are_not_taken_for_the_process() {
        let me = std::process::id();
        let start = host::start_time(me).unwrap();
        assert!(watch(me, start).unwrap().is_some());
        assert!(watch(me, start + 1).unwrap().is_none());
        assert!(watch(0, start).unwrap().is_none());
        assert!(watch(u32::MAX, start).unwrap().is_none());
    }

    #[test]
    fn a_zombie_has_ended() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let start = host::start_time(child.id()).unwrap();
        child.wait().unwrap();
        assert!(watch(child.id(), start).unwrap().is_none());
    }
}
