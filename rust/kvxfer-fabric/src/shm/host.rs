//! What this host and this process are: identity for `reaches`, and facts for people.

use super::os_error;
use crate::FabricError;
use rustix::fs::{FileType, StatVfs};
use std::path::Path;

/// Where a process lives. Two processes can share memory through this fabric when all of it is equal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct HostId {
    /// The kernel's boot.
    pub(crate) boot_id: [u8; 16],
    /// Process ids mean the same.
    pub(crate) pid_ns: u64,
    /// Abstract socket names mean the same.
    pub(crate) net_ns: u64,
    /// Effective user.
    pub(crate) uid: u32,
}

impl HostId {
    pub(crate) fn of_this_process() -> Result<Self, FabricError> {
        let text = read_text("/proc/sys/kernel/random/boot_id").ok_or_else(|| {
            unavailable("/proc/sys/kernel/random/boot_id cannot be read; is /proc mounted?")
        })?;
        let boot_id =
            parse_uuid(&text).ok_or_else(|| unavailable(&format!("the boot id {text:?} is no UUID")))?;
        Ok(Self {
            boot_id,
            pid_ns: namespace("pid")?,
            net_ns: namespace("net")?,
            uid: rustix::process::geteuid().as_raw(),
        })
    }
}

fn unavailable(why: &str) -> FabricError {
    FabricError::Unavailable { fabric: "shm", why: why.to_owned() }
}

fn namespace(kind: &str) -> Result<u64, FabricError> {
    let path = format!("/proc/self/ns/{kind}");
    let stat = rustix::fs::stat(path.as_str()).map_err(|e| os_error("stat", &format!("{path}: {e}")))?;
    Ok(stat.st_ino)
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let mut out = [0u8; 16];
    let mut digits = text.trim().chars().filter(|c| *c != '-').map(|c| c.to_digit(16));
    for byte in &mut out {
        let (hi, lo) = (digits.next()??, digits.next()??);
        *byte = u8::try_from(hi * 16 + lo).ok()?;
    }
    digits.next().is_none().then_some(out)
}

/// When a process started, in clock ticks since boot: together with its id it names the process for good.
/// `None` when there is no such process.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    parse_start_time(&std::fs::read(format!("/proc/{pid}/stat")).ok()?)
}

fn parse_start_time(stat: &[u8]) -> Option<u64> {
    // The command name is in parentheses and may hold anything, parentheses too.
    let end = stat.iter().rposition(|b| *b == b')')?;
    let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
    // The first field after the name is number 3; the start time is number 22.
    rest.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

fn read_text(path: &str) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

/// Free and reserved huge pages of one size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HugePages {
    /// Bytes a page.
    pub page_bytes: u64,
    /// Pages in the pool.
    pub total: u64,
    /// Pages that are free.
    pub free: u64,
}

/// What this host offers to the `shm` fabric.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostReport {
    /// `kernel.yama.ptrace_scope`; `None` where the kernel has no Yama (then scope 0 holds).
    pub ptrace_scope: Option<u8>,
    /// Soft limit of locked memory in bytes; `None` is unlimited.
    pub memlock_bytes: Option<u64>,
    /// Hard limit of locked memory in bytes; `None` is unlimited.
    pub memlock_hard_bytes: Option<u64>,
    /// Size of `/dev/shm` in bytes, if it is mounted. Pools are memfds and do not count against it; UCX's
    /// POSIX transport does.
    pub dev_shm_bytes: Option<u64>,
    /// Free bytes of `/dev/shm`.
    pub dev_shm_free_bytes: Option<u64>,
    /// Huge page pools, smallest page first.
    pub huge_pages: Vec<HugePages>,
    /// The kernel's setting for transparent huge pages in shared memory, for instance `advise`.
    pub shmem_huge: Option<String>,
    /// Identity of this boot.
    pub boot_id: Option<String>,
    /// Inode of the process-id namespace; peers in another one are out of reach.
    pub pid_namespace: Option<u64>,
    /// Open descriptors that this process may have.
    pub descriptor_limit: Option<u64>,
}

/// Looks at this host. What cannot be read is `None`.
#[must_use]
pub fn host_report() -> HostReport {
    use rustix::process::{Resource, getrlimit};
    let memlock = getrlimit(Resource::Memlock);
    let shm: Option<StatVfs> = is_dir("/dev/shm").then(|| rustix::fs::statvfs("/dev/shm").ok()).flatten();
    HostReport {
        ptrace_scope: ptrace_scope(),
        memlock_bytes: memlock.current,
        memlock_hard_bytes: memlock.maximum,
        dev_shm_bytes: shm.as_ref().map(|s| s.f_blocks.saturating_mul(s.f_frsize)),
        dev_shm_free_bytes: shm.as_ref().map(|s| s.f_bavail.saturating_mul(s.f_frsize)),
        huge_pages: huge_pages(Path::new("/sys/kernel/mm/hugepages")),
        shmem_huge: read_text("/sys/kernel/mm/transparent_hugepage/shmem_enabled").and_then(|t| chosen(&t)),
        boot_id: read_text("/proc/sys/kernel/random/boot_id"),
        pid_namespace: namespace("pid").ok(),
        descriptor_limit: getrlimit(Resource::Nofile).current,
    }
}

pub(crate) fn ptrace_scope() -> Option<u8> {
    read_text("/proc/sys/kernel/yama/ptrace_scope")?.parse().ok()
}

fn is_dir(path: &str) -> bool {
    rustix::fs::stat(path).is_ok_and(|s| FileType::from_raw_mode(s.st_mode) == FileType::Directory)
}

/// The word in brackets of a setting such as `always [advise] never`.
fn chosen(setting: &str) -> Option<String> {
    let (_, rest) = setting.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

fn huge_pages(root: &Path) -> Vec<HugePages> {
    let Ok(dir) = std::fs::read_dir(root) else { return Vec::new() };
    let number =
        |path: std::path::PathBuf| -> Option<u64> { std::fs::read_to_string(path).ok()?.trim().parse().ok() };
    let mut out: Vec<HugePages> = dir
        .filter_map(|entry| {
            let entry = entry.ok()?;
            let name = entry.file_name();
            let kib: u64 = name.to_str()?.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
            Some(HugePages {
                page_bytes: kib.checked_mul(1024)?,
                total: number(entry.path().join("nr_hugepages"))?,
                free: number(entry.path().join("free_hugepages"))?,
            })
        })
        .collect();
    out.sort_by_key(|p| p.page_bytes);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_time_survives_odd_command_names() {
        let stat = b"12 (a) S (b) c) R 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21";
        assert_eq!(parse_start_time(stat), Some(4711));
        assert_eq!(parse_start_time(b"12 (x) R 1 2"), None);
        assert_eq!(parse_start_time(b""), None);
        let me = start_time(std::process::id()).unwrap();
        assert!(me > 0);
        assert_eq!(start_time(std::process::id()), Some(me), "it does not change");
        assert_eq!(start_time(0x7fff_fff0), None);
    }

    #[test]
    fn uuids() {
        let id = parse_uuid("00010203-0405-0607-0809-0a0b0c0d0eff\n").unwrap();
        assert_eq!(id, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 255]);
        assert_eq!(parse_uuid("00"), None);
        assert_eq!(parse_uuid("00010203-0405-0607-0809-0a0b0c0d0eff0"), None);
        assert_eq!(parse_uuid("zz010203-0405-0607-0809-0a0b0c0d0eff"), None);
    }

    #[test]
    fn report_has_what_every_linux_has() {
        let r = host_report();
        assert_eq!(r.boot_id.unwrap().len(), 36);
        assert!(r.pid_namespace.is_some());
        assert!(r.descriptor_limit.is_none_or(|n| n > 0));
        assert_eq!(chosen("always within_size [advise] never"), Some("advise".to_owned()));
        assert_eq!(chosen("never"), None);
    }
}
