//! Yama's leave to read this process's memory, which a process gives as a whole and to one other at a time.

use super::host;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How many attachments each reader process has, over all fabrics of this process.
static READERS: Mutex<BTreeMap<u32, usize>> = Mutex::new(BTreeMap::new());

/// Leave for one reader; taken back when dropped.
#[derive(Debug)]
pub(crate) struct Leave {
    pid: u32,
    /// A forked child has given no leave of its own, and must not wait for a lock held at the fork.
    owner: u32,
}

impl Leave {
    /// Lets `pid`, whose identity the kernel vouched for and who showed a valid token, read our memory. `None`
    /// when Yama would have to take it from another reader for that.
    pub(crate) fn give(pid: u32, allow_any: bool) -> Option<Self> {
        let mut readers = lock();
        let newcomer = !readers.contains_key(&pid) && !readers.is_empty();
        if newcomer && !allow_any && host::ptrace_scope() == Some(1) {
            return None;
        }
        *readers.entry(pid).or_insert(0) += 1;
        apply(&readers, allow_any);
        Some(Self { pid, owner: std::process::id() })
    }
}

impl Drop for Leave {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            return;
        }
        let mut readers = lock();
        if let Some(n) = readers.get_mut(&self.pid) {
            *n -= 1;
            if *n == 0 {
                readers.remove(&self.pid);
                apply(&readers, true);
            }
        }
    }
}

fn lock() -> MutexGuard<'static, BTreeMap<u32, usize>> {
    READERS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn apply(readers: &BTreeMap<u32, usize>, allow_any: bool) {
    let tracer = match (readers.len(), readers.keys().next()) {
        (1, Some(pid)) => libc::c_ulong::from(*pid),
        (0, _) | (_, None) => 0,
        // More than one got here only where the caller allowed it or Yama does not ask.
        _ if allow_any && host::ptrace_scope() == Some(1) => libc::PR_SET_PTRACER_ANY,
        _ => return,
    };
    // SAFETY: PR_SET_PTRACER takes a process id by value and touches no memory of ours.
    let rc = unsafe { libc::prctl(libc::PR_SET_PTRACER, tracer, 0, 0, 0) };
    if rc != 0 {
        // EINVAL is a kernel without Yama: there is nothing to allow. The reader's own probe tells for sure.
        tracing::debug!(error = %std::io::Error::last_os_error(), tracer, "PR_SET_PTRACER");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leave_is_counted_per_process() {
        let me = std::process::id();
        let before = lock().get(&me).copied().unwrap_or(0);
        let a = Leave::give(me, true).unwrap();
        let b = Leave::give(me, true).unwrap();
        assert!(lock().get(&me).copied().unwrap_or(0) >= before + 2);
        drop(a);
        assert!(lock().get(&me).copied().unwrap_or(0) > before);
        drop(b);
    }
}
