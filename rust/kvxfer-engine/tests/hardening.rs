//! What must not happen: rooms that wait forever, threads that spin, descriptors and peers that stay.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    clippy::redundant_clone
)]

mod support;

use kvxfer_engine::{Agent, AgentConfig, CallError, FabricChoice, WaitError};
use kvxfer_fabric::{FabricError, ReadySignal};
use kvxfer_proto::ReasonKind;
use kvxfer_proto::node::EventKind;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use support::{LIMIT, Party, expect, party, push, side};

fn shm(name: &str) -> Party {
    party(name, side(0, 1), FabricChoice::Shm, true, |_| {})
}

fn quick(name: &str) -> Party {
    party(name, side(0, 1), FabricChoice::Shm, true, |c| {
        c.limits.handshake_timeout = Duration::from_millis(200);
    })
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Seconds of processor that the transfer thread with this name has used.
fn cpu(thread: &str) -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let mine = tasks.filter(|t| {
        std::fs::read_to_string(t.path().join("comm"))
            .is_ok_and(|comm| comm.trim_end() == format!("kvx-{thread}"))
    });
    let ns = mine.filter_map(|t| {
        let stat = std::fs::read_to_string(t.path().join("schedstat")).ok()?;
        stat.split_whitespace().next()?.parse::<f64>().ok()
    });
    ns.sum::<f64>() / 1e9
}

/// Waits for something that the agent's thread does by itself.
fn eventually(what: &str, mut f: impl FnMut() -> bool) {
    let until = Instant::now() + LIMIT;
    while !f() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_silent_connection_is_closed_by_an_idle_and_by_a_busy_thread() {
    for busy in [false, true] {
        let p = quick("silent");
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            if busy {
                s.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let _ = p.agent.evict("nobody");
                    }
                });
            }
            let mut c = TcpStream::connect(p.agent.address()).unwrap();
            c.set_read_timeout(Some(LIMIT)).unwrap();
            let mut rest = Vec::new();
            let closed = c.read_to_end(&mut rest);
            stop.store(true, Ordering::Relaxed);
            assert!(closed.is_ok(), "busy: {busy}");
        });
    }
}

#[test]
fn a_directory_that_says_nothing_is_asked_again() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let d = quick("asks");
    d.agent.expect(expect(1, &[1], 0, 16, &silent.local_addr().unwrap().to_string())).unwrap();
    let first = silent.accept().unwrap();
    let second = silent.accept().unwrap();
    drop((first, second));
}

#[test]
fn time_for_a_handshake_begins_when_the_connection_is_accepted() {
    let p = quick("late");
    // Longer than the limit, so that the thread has slept through it.
    std::thread::park_timeout(Duration::from_millis(400));
    let mut c = TcpStream::connect(p.agent.address()).unwrap();
    c.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    c.write_all(&[0]).unwrap();
    let err = c.read(&mut [0; 1]).expect_err("it still has time");
    assert!(matches!(err.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut), "{err}");
}

#[test]
fn closing_ends_every_room_that_was_ordered() {
    let d = shm("long");
    for n in 0..3000u64 {
        d.agent.open(n, None, None).unwrap();
    }
    d.agent.close(Duration::from_secs(2));
    let mut told = 0;
    d.agent.poll(|e| told += u32::from(matches!(e.kind, EventKind::Failed(_))));
    assert_eq!(told, 3000, "each has its event");
}

#[test]
fn orders_that_race_with_close_are_refused_or_answered() {
    for _ in 0..30 {
        let d = shm("race");
        let (agent, ordered) = (&d.agent, AtomicU64::new(0));
        let rooms: Vec<u64> = std::thread::scope(|s| {
            let callers: Vec<_> = (0..2u64)
                .map(|k| {
                    let ordered = &ordered;
                    s.spawn(move || {
                        let mut mine = Vec::new();
                        for room in (k << 32).. {
                            match agent.open(room, None, None) {
                                Ok(()) => mine.push(room),
                                Err(CallError::Closed) => return mine,
                                Err(_) => std::thread::yield_now(),
                            }
                            ordered.fetch_add(1, Ordering::Relaxed);
                        }
                        mine
                    })
                })
                .collect();
            eventually("callers are at it", || ordered.load(Ordering::Relaxed) > 100);
            agent.close(Duration::from_secs(2));
            callers.into_iter().flat_map(|c| c.join().unwrap()).collect()
        });
        for room in rooms {
            let end = d.agent.wait(room, Some(Duration::ZERO));
            assert!(!matches!(end, Err(WaitError::Timeout { .. })), "room {room} waits forever");
        }
    }
}

#[test]
fn a_cancel_after_the_end_does_not_poison_the_number() {
    let (mut p, mut d) = (shm("p"), shm("d"));
    for _ in 0..100 {
        d.agent.expect(expect(1, &[1], 0, 16, p.agent.address())).unwrap();
        p.agent.push(push(1, &[1], 0, 16)).unwrap();
        p.agent.wait(1, Some(LIMIT)).unwrap();
        d.agent.wait(1, Some(LIMIT)).unwrap();
        p.agent.cancel(1).unwrap();
        d.agent.cancel(1).unwrap();
        d.succeeds(1);
        p.succeeds(1);
    }
}

#[test]
fn a_number_whose_failure_was_forgotten_can_be_used_and_ends() {
    let p = shm("again");
    for n in 0..4200u64 {
        p.agent.open(n, None, None).unwrap();
        p.agent.cancel(n).unwrap();
        p.agent.wait(n, Some(LIMIT)).unwrap();
        p.agent.poll(|_| {});
    }
    eventually("number 1 is free", || {
        p.agent.poll(|_| {});
        p.agent.open(1, None, None).is_ok()
    });
    assert!(p.agent.wait(1, Some(LIMIT)).unwrap().error().is_some(), "its tombstone answers at once");
}

#[test]
fn a_push_into_a_room_that_is_expected_here_is_refused_and_harms_nobody() {
    let (mut p, mut d) = (shm("p"), shm("d"));
    d.agent.expect(expect(1, &[1], 0, 16, p.agent.address())).unwrap();
    assert_eq!(d.agent.push(push(1, &[2], 0, 16)), Err(CallError::RoomInUse(1)));
    p.agent.push(push(1, &[1], 0, 16)).unwrap();
    d.succeeds(1);
    p.succeeds(1);
}

#[test]
fn a_pushs_own_timeout_counts_from_contact() {
    let (mut p, d) = (shm("p"), shm("d"));
    d.agent.expect(expect(1, &[1], 0, 16, p.agent.address())).unwrap();
    let mut order = push(1, &[1], 0, 16);
    (order.layers, order.last, order.timeout) = (Some((0, 1)), false, Some(Duration::from_millis(300)));
    p.agent.push(order).unwrap();
    assert_eq!(p.fails(1).kind, ReasonKind::TransferTimeout);
}

#[test]
fn sessions_that_do_not_last_are_not_dialled_for_in_a_tight_loop() {
    // A peer that passes the handshake and then breaks the protocol, each time.
    let mut p = shm("p");
    let mut d = party("d", side(0, 1), FabricChoice::Shm, true, |c| c.node.quarantine_limit = u64::MAX);
    d.agent.expect(expect(1, &[1], 0, 16, p.agent.address())).unwrap();
    p.agent.push(push(1, &[1], 0, 16)).unwrap();
    d.succeeds(1);
    p.succeeds(1);
    let before = d.agent.stats().counters.sessions;
    // The source goes away while a room waits for it: decode dials, at a growing distance.
    d.agent.expect(expect(2, &[1], 0, 16, p.agent.address())).unwrap();
    drop(p);
    let reason = d.fails(2);
    assert!(matches!(reason.kind, ReasonKind::PeerLost | ReasonKind::Closed), "{}", reason.text);
    assert!(d.agent.stats().counters.sessions <= before + 1);
}

#[test]
fn racing_submits_leave_the_thread_able_to_sleep() {
    let p = shm("sleeper");
    std::thread::scope(|s| {
        for k in 0..2u32 {
            let agent = &p.agent;
            s.spawn(move || {
                // Around the thread's spinning time, so that submits meet it as it falls asleep.
                for i in 0..2000u32 {
                    let _ = agent.evict("nobody");
                    let until = Instant::now() + Duration::from_micros(u64::from(40 + (i * 7 + k * 13) % 60));
                    while Instant::now() < until {
                        std::hint::spin_loop();
                    }
                }
            });
        }
    });
    let before = cpu("sleeper");
    std::thread::park_timeout(Duration::from_secs(1));
    let used = cpu("sleeper") - before;
    assert!(used < 0.05, "an idle thread used {used} s of a second");
}

#[test]
fn peers_that_come_and_go_leave_nothing() {
    let mut p = shm("stays");
    let run = |p: &mut Party, r: u64| {
        let mut d = shm("goes");
        d.agent.expect(expect(r, &[1], 0, 16, p.agent.address())).unwrap();
        p.agent.push(push(r, &[1], 0, 16)).unwrap();
        d.succeeds(r);
        p.succeeds(r);
    };
    run(&mut p, 1000);
    eventually("the first is gone", || p.agent.stats().gauges.peers == 0 && p.agent.stats().connections == 0);
    let before = descriptors();
    for r in 0..30u64 {
        run(&mut p, r);
    }
    eventually("all are gone", || p.agent.stats().gauges.peers == 0 && p.agent.stats().connections == 0);
    eventually("no descriptor is left over", || descriptors() <= before);
}

/// Also of ranks that a directory named and that owe this one nothing.
#[test]
fn a_source_that_comes_and_goes_leaves_nothing() {
    let mut decode = [0, 1].map(|rank| party("stays", side(rank, 2), FabricChoice::Shm, true, |_| {}));
    for room in 0..5u64 {
        let first = party("p0", side(0, 2), FabricChoice::Shm, true, |c| c.engine = "p".to_owned());
        let at = first.agent.address().to_owned();
        let second = party("p1", side(1, 2), FabricChoice::Shm, true, |c| {
            (c.engine, c.directory) = ("p".to_owned(), Some(at.clone()));
        });
        for d in &decode {
            d.agent.expect(expect(room, &[1], 0, 16, &at)).unwrap();
        }
        let mut prefill = [first, second];
        for p in &mut prefill {
            p.agent.push(push(room, &[1], 0, 16)).unwrap();
        }
        for party in prefill.iter_mut().chain(&mut decode) {
            party.succeeds(room);
        }
        eventually("the peers are counted", || decode.iter().all(|d| d.agent.stats().driver_entries > 0));
        drop(prefill);
        for d in &decode {
            eventually("nothing is left", || {
                let stats = d.agent.stats();
                (stats.gauges.peers, stats.connections, stats.driver_entries) == (0, 0, 0)
            });
        }
    }
}

#[test]
fn failing_starts_and_strangers_leave_no_descriptor() {
    let p = shm("target");
    let before = descriptors();
    for n in 0..60 {
        let memory = support::Memory::new(&side(0, 1), true);
        let mut c = AgentConfig::new("x", side(0, 1), vec![support::PAGES], memory.spans.clone());
        c.fabric = FabricChoice::Shm;
        match n % 3 {
            0 => c.listen = p.agent.address().to_owned(),
            1 => c.directory = Some("1::2::3".to_owned()),
            _ => c.regions.truncate(2),
        }
        assert!(Agent::start(c).is_err());
        let mut s = TcpStream::connect(p.agent.address()).unwrap();
        s.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let _ = s.read_to_end(&mut Vec::new());
    }
    eventually("nothing is left", || descriptors() <= before && p.agent.stats().connections == 0);
}

/// A GPU's event, played by a flag.
#[derive(Debug, Default)]
struct Flag {
    set: AtomicBool,
    fails: bool,
}

impl ReadySignal for Flag {
    fn is_ready(&self) -> Result<bool, FabricError> {
        if self.fails {
            return Err(FabricError::Os { call: "event query", why: "the device is lost".to_owned() });
        }
        Ok(self.set.load(Ordering::SeqCst))
    }
}

#[test]
fn pages_that_are_not_ready_are_not_read_and_their_success_waits() {
    let (mut p, mut d) = (shm("p"), shm("d"));
    p.memory.fill(|_| 1);
    let flag = Arc::new(Flag::default());
    let mut order = push(1, &[3], 0, 16);
    order.ready = Some(Arc::clone(&flag) as Arc<dyn ReadySignal>);
    p.agent.push(order).unwrap();
    d.agent.expect(expect(1, &[4], 0, 16, p.agent.address())).unwrap();
    // Another room passes it.
    d.agent.expect(expect(2, &[5], 0, 16, p.agent.address())).unwrap();
    p.agent.push(push(2, &[5], 0, 16)).unwrap();
    d.succeeds(2);
    p.succeeds(2);
    assert!(d.memory.page(0, 4).iter().all(|b| *b == 0), "nothing was sent early");
    // The kernel that fills the pages ends after the push was ordered.
    p.memory.fill(|_| 7);
    flag.set.store(true, Ordering::SeqCst);
    d.succeeds(1);
    p.succeeds(1);
    assert!(d.memory.page(0, 4).iter().all(|b| *b == 7));
}

#[test]
fn a_signal_that_fails_or_outlives_its_room_ends_with_it() {
    let mut p = shm("p");
    let mut order = push(1, &[3], 0, 16);
    order.ready = Some(Arc::new(Flag { fails: true, ..Flag::default() }));
    p.agent.push(order).unwrap();
    let reason = p.fails(1);
    assert_eq!(reason.kind, ReasonKind::FabricError);
    assert!(reason.text.contains("the device is lost"), "{}", reason.text);
    let flag: Arc<dyn ReadySignal> = Arc::new(Flag::default());
    let mut order = push(2, &[3], 0, 16);
    order.ready = Some(Arc::clone(&flag));
    p.agent.push(order).unwrap();
    p.agent.cancel(2).unwrap();
    p.fails(2);
    eventually("the thread lets go of the signal", || Arc::strong_count(&flag) == 1);
}

/// A signal that panics once it is told to.
#[derive(Debug, Default)]
struct Bomb {
    asked: AtomicBool,
    lit: AtomicBool,
}

impl ReadySignal for Bomb {
    fn is_ready(&self) -> Result<bool, FabricError> {
        self.asked.store(true, Ordering::SeqCst);
        while !self.lit.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        panic!("a test's own panic in the transfer thread");
    }
}

#[test]
fn a_panic_of_the_thread_ends_every_wait_and_calls_no_page_free() {
    let p = shm("p");
    let bomb = Arc::new(Bomb::default());
    p.agent.open(1, None, None).unwrap();
    let mut order = push(2, &[3], 0, 16);
    (order.ready, order.last) = (Some(Arc::clone(&bomb) as Arc<dyn ReadySignal>), false);
    p.agent.push(order).unwrap();
    eventually("the thread is in the signal", || bomb.asked.load(Ordering::SeqCst));
    // These wait in the queue: the thread never takes them.
    p.agent.push(push(2, &[4], 16, 16)).unwrap();
    p.agent.push(push(3, &[5], 0, 16)).unwrap();
    bomb.lit.store(true, Ordering::SeqCst);
    for room in 1..4 {
        let end = p.agent.wait(room, Some(LIMIT)).unwrap();
        assert_eq!(end.error().map(|r| r.kind), Some(ReasonKind::Internal), "room {room}: {end:?}");
        assert!(!end.released, "room {room}: what was in flight may still be");
    }
    p.agent.close(Duration::from_secs(1));
}
