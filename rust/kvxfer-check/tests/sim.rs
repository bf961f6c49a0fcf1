#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]
use kvxfer_check::sim::{SimOptions, run};
use kvxfer_proto::node::Mover;
use kvxfer_fabric::sim::FenceRule;
#[test]
fn smoke() {
    let get = |k: &str, d: u64| std::env::var(k).ok().map_or(d, |s| s.parse().unwrap());
    for seed in get("FROM", 0)..get("TO", 10) {
        let t = std::time::Instant::now();
        let mover = if get("RECV", 0) == 1 { Mover::Receiver } else { Mover::Sender };
        let fence = if get("IMP", 0) == 1 { FenceRule::Impossible } else { FenceRule::Completes };
        let o = SimOptions { mover, fence, rooms: get("ROOMS", 300) as u32, concurrent: get("CONC", 64) as u32, ..SimOptions::new(seed) };
        if get("LOG", 0) == 1 { let mut f = std::io::BufWriter::new(std::fs::File::create(format!("/tmp/w/sim-log-{seed}.txt")).unwrap()); let r = kvxfer_check::sim::run_logged(&o, &mut f).unwrap(); println!("{r:#?}"); continue; }
        let r = run(&o);
        println!("{:?} seed {seed}: {} rooms ok {} failed {} cancelled {} unended {} corrupt {} leaked {} late {} cmw {} kmw {} drain {} {} virt {} writes {} frames {} sess {} fences {} stale {} viol {} faults {:?}", t.elapsed(), r.rooms, r.succeeded, r.failed, r.cancelled, r.unended, r.corrupt_bytes, r.leaked_pages, r.late_writes, r.cancelled_mid_write, r.kills_mid_write, r.drain_us_p50, r.drain_us_p99, r.virtual_us, r.writes_landed, r.frames, r.sessions, r.fences, r.stale_refused, r.violation_count, r.faults);
        for v in r.violations.iter().take(3) { println!("    {v}"); }
    }
}
