//! Agents with memory of their own, for tests.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::needless_pass_by_value,
    clippy::cast_possible_truncation,
    clippy::unwrap_used
)]

use kvxfer_engine::{Agent, AgentConfig, AgentEvent, ExpectOrder, FabricChoice, PushOrder};
use kvxfer_fabric::shm::ShmPool;
use kvxfer_fabric::ucx::{UcxOptions, UcxPool};
use kvxfer_fabric::{Backing, MemKind, RegionSpan};
use kvxfer_proto::msg::Verify;
use kvxfer_proto::node::EventKind;
use kvxfer_proto::{DType, Kind, Order, PageLayout, Shard, Side};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const PAGES: u32 = 64;
pub const LIMIT: Duration = Duration::from_secs(20);

pub fn side(tp_rank: u32, tp_size: u32) -> Side {
    let layout = PageLayout {
        layers: 3,
        kv_heads: 4,
        head_dim: 64,
        page_tokens: 16,
        dtype: DType::Bfloat16,
        order: Order::Hnd,
        kind: Kind::Kv,
        ..PageLayout::PLAIN
    };
    Side { groups: vec![layout], shard: Shard { tp_rank, tp_size, pp_rank: 0, pp_size: 1 } }
}

/// One allocation, cut into the regions of a side.
pub struct Memory {
    pool: Option<Arc<dyn Backing>>,
    plain: Vec<u8>,
    pub spans: Vec<RegionSpan>,
}

impl Memory {
    pub fn new(side: &Side, pool: bool) -> Self {
        let total: u64 = side.regions(&[PAGES]).unwrap().iter().map(|s| s.len).sum();
        Self::over(side, pool.then(|| ShmPool::alloc(total).unwrap()))
    }

    /// Memory that UCX allocated, which its shared-memory transports can write.
    pub fn of_ucx(side: &Side) -> Self {
        let total: u64 = side.regions(&[PAGES]).unwrap().iter().map(|s| s.len).sum();
        let options = UcxOptions { wheel_dir: wheel_dir(), ..UcxOptions::default() };
        Self::over(side, Some(UcxPool::alloc(total, &options).unwrap()))
    }

    fn over(side: &Side, pool: Option<Arc<dyn Backing>>) -> Self {
        let shapes = side.regions(&[PAGES]).unwrap();
        let total: u64 = shapes.iter().map(|s| s.len).sum();
        let plain = if pool.is_none() { vec![0u8; total as usize] } else { Vec::new() };
        let mut at = pool.as_ref().map_or(plain.as_ptr() as u64, |p| p.addr());
        let spans = shapes
            .iter()
            .map(|s| {
                let span = RegionSpan { addr: at, len: s.len, kind: MemKind::Host, backing: pool.clone() };
                at += s.len;
                span
            })
            .collect();
        Self { pool, plain, spans }
    }

    fn base(&self) -> u64 {
        self.pool.as_ref().map_or(self.plain.as_ptr() as u64, |p| p.addr())
    }

    fn total(&self) -> usize {
        self.spans.iter().map(|s| s.len as usize).sum()
    }

    /// What the memory holds. Read through the kernel, since a transfer thread writes it behind the compiler's back.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = vec![0; self.total()];
        File::open("/proc/self/mem").unwrap().read_exact_at(&mut out, self.base()).unwrap();
        out
    }

    pub fn fill(&mut self, f: impl Fn(usize) -> u8) {
        let bytes: Vec<u8> = (0..self.total()).map(f).collect();
        File::options()
            .write(true)
            .open("/proc/self/mem")
            .unwrap()
            .write_all_at(&bytes, self.base())
            .unwrap();
    }

    /// Bytes of a page of a region.
    pub fn page(&self, region: usize, page: u32) -> Vec<u8> {
        let size = self.spans[region].len as usize / PAGES as usize;
        let start: usize =
            self.spans[..region].iter().map(|s| s.len as usize).sum::<usize>() + page as usize * size;
        self.bytes()[start..start + size].to_vec()
    }
}

pub struct Party {
    pub agent: Agent,
    pub memory: Memory,
    pub seen: VecDeque<AgentEvent>,
}

pub fn party(
    name: &str,
    side: Side,
    fabric: FabricChoice,
    pool: bool,
    tune: impl FnOnce(&mut AgentConfig),
) -> Party {
    party_with(name, side.clone(), fabric, Memory::new(&side, pool), tune)
}

pub fn party_with(
    name: &str,
    side: Side,
    fabric: FabricChoice,
    memory: Memory,
    tune: impl FnOnce(&mut AgentConfig),
) -> Party {
    let mut config = AgentConfig::new(name, side, vec![PAGES], memory.spans.clone());
    config.fabric = fabric;
    config.ucx_wheel_dir = wheel_dir();
    tune(&mut config);
    Party { agent: Agent::start(config).unwrap(), memory, seen: VecDeque::new() }
}

fn wheel_dir() -> Option<std::path::PathBuf> {
    std::env::var_os("KVXFER_TEST_UCX_WHEEL")
        .map(std::path::PathBuf::from)
        .and_then(|p| if p.is_dir() { Some(p) } else { p.parent().map(std::path::Path::to_path_buf) })
}

impl Party {
    /// The next event, awaited on the agent's descriptor.
    pub fn next_event(&mut self) -> AgentEvent {
        let until = Instant::now() + LIMIT;
        loop {
            let seen = &mut self.seen;
            self.agent.poll(|e| seen.push_back(e));
            if let Some(e) = self.seen.pop_front() {
                return e;
            }
            assert!(Instant::now() < until, "no event within {LIMIT:?}: {:?}", self.agent.stats());
            let mut fds = [PollFd::from_borrowed_fd(self.agent.event_fd(), PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 })).unwrap();
        }
    }

    /// Asserts that the room's only event is a success.
    pub fn succeeds(&mut self, room: u64) -> AgentEvent {
        let e = self.next_event();
        assert_eq!(e.room.get(), room);
        assert_eq!(e.kind, EventKind::Success);
        assert!(e.released);
        e
    }

    /// The room's failure, and its release.
    pub fn fails(&mut self, room: u64) -> kvxfer_proto::Reason {
        let e = self.next_event();
        assert_eq!(e.room.get(), room);
        let EventKind::Failed(reason) = e.kind else { panic!("{:?}", e.kind) };
        if !e.released {
            let e = self.next_event();
            assert_eq!((e.room.get(), e.kind), (room, EventKind::Released));
        }
        reason
    }
}

pub fn expect(room: u64, pages: &[u32], start: u64, tokens: u64, source: &str) -> ExpectOrder {
    ExpectOrder {
        room,
        pages: vec![Arc::from(pages)],
        odd_page: None,
        start,
        tokens,
        source: source.to_owned(),
        source_dp_rank: 0,
        verify: Verify::Off,
        bootstrap_timeout: None,
        timeout: None,
    }
}

pub fn push(room: u64, pages: &[u32], start: u64, tokens: u64) -> PushOrder {
    PushOrder {
        room,
        pages: vec![Arc::from(pages)],
        odd_page: None,
        start,
        tokens,
        layers: None,
        last: true,
        meta: None,
        ready: None,
        bootstrap_timeout: None,
        timeout: None,
    }
}
