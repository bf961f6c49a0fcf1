//! Walks every state of the small worlds and prints what was found:
//!
//! ```text
//! cargo run --release -p kvxfer-check --example model_check -- [--faults N] [--family NAME] [--sources N] [--in-order]
//!     [--kinds cancel,stop] [--stops N] [--flaw NAME] [--pieces N] [--slots N] [--walks N] [--limit N] [--whole] [--all-orders]
//!     [--outcomes] [--json]
//! ```
//!
//! Without arguments, all the worlds that `make model` walks, two at a time. Ends with 1 if anything was found, or if a
//! world has fewer states than it must have.
#![allow(clippy::print_stdout, clippy::print_stderr)]

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

use kvxfer_check::model::{
    Family, FaultKind, Reduction, Report, Setup, explore_and_tell, explore_staging, walk,
};
use kvxfer_proto::node::Flaw;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// States of one world before the walk gives up, unless `--limit` says otherwise: 150 million fingerprints are 5 GB.
const LIMIT: u64 = 150_000_000;

struct Job {
    setup: Setup,
    at_least: u64,
}

impl Job {
    fn name(&self) -> String {
        let s = &self.setup;
        let sources = if s.sources == 1 { "1 source" } else { "2 sources" };
        let kinds: Vec<&str> = s.kinds.iter().map(|k| k.name()).collect();
        let kinds = if s.kinds.len() == FaultKind::ALL.len() { "any".to_owned() } else { kinds.join(" or ") };
        let plural = if s.faults == 1 { "" } else { "s" };
        let stops = if s.stops < s.faults { format!(", {} stop at most", s.stops) } else { String::new() };
        let order = if s.in_order { ", timers in order" } else { "" };
        format!("{}, {sources}, up to {} fault{plural} ({kinds}{stops}){order}", s.family.name(), s.faults)
    }
}

struct Args {
    jobs: Vec<Job>,
    walks: u64,
    json: bool,
    one: bool,
    limit: u64,
    outcomes: bool,
}

/// The worlds of `make model`. Larger ones are walked by naming them: `--sources 2 --faults 2 --family writes-fenced`.
fn all() -> Vec<Job> {
    // The longest first.
    let two = |family| Setup { in_order: true, ..Setup::new(family, 2) };
    let mut jobs: Vec<Job> = [Family::WritesUnfenced, Family::WritesFenced, Family::Copies]
        .map(|family| Job { setup: two(family), at_least: 4_000_000 })
        .into();
    for family in Family::ALL {
        jobs.push(Job { setup: Setup::new(family, 1), at_least: 100_000 });
        jobs.push(Job { setup: Setup { sources: 1, ..Setup::new(family, 2) }, at_least: 200_000 });
    }
    jobs
}

fn parse() -> Result<Args, String> {
    let mut args = std::env::args().skip(1);
    let mut families = Family::ALL.to_vec();
    let mut like = Setup::new(Family::Copies, 2);
    let (mut one, mut walks, mut json, mut limit) = (false, 20_000, false, LIMIT);
    let mut outcomes = false;
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} wants a value"));
        let number = |v: String| v.parse::<u64>().map_err(|e| format!("{v}: {e}"));
        one |= !matches!(arg.as_str(), "--json" | "--walks");
        match arg.as_str() {
            "--json" => json = true,
            "--walks" => walks = number(value()?)?,
            "--outcomes" => outcomes = true,
            "--limit" => limit = number(value()?)?,
            "--whole" => like.reduced = Reduction::None,
            "--all-orders" => like.reduced = Reduction::States,
            "--in-order" => like.in_order = true,
            "--faults" => {
                like.faults = u8::try_from(number(value()?)?).map_err(|e| e.to_string())?;
                like.stops = like.faults;
            }
            "--stops" => like.stops = u8::try_from(number(value()?)?).map_err(|e| e.to_string())?,
            "--pieces" => {
                like.pieces = u8::try_from(number(value()?)?.clamp(1, 2)).map_err(|e| e.to_string())?;
            }
            "--slots" => {
                like.slots = u8::try_from(number(value()?)?.clamp(1, 4)).map_err(|e| e.to_string())?;
            }
            "--sources" => like.sources = if number(value()?)? == 1 { 1 } else { 2 },
            "--family" => {
                let v = value()?;
                families = vec![Family::from_name(&v).ok_or(format!("no family is called {v}"))?];
            }
            "--flaw" => {
                let v = value()?;
                like.flaw = Some(Flaw::from_name(&v).ok_or(format!("no flaw is called {v}"))?);
            }
            "--kinds" => {
                let v = value()?;
                like.kinds = v
                    .split(',')
                    .map(|k| {
                        FaultKind::ALL.into_iter().find(|f| f.name() == k).ok_or(format!("no fault {k}"))
                    })
                    .collect::<Result<_, _>>()?;
            }
            other => return Err(format!("unknown argument {other}")),
        }
    }
    let jobs = if one {
        families
            .into_iter()
            .map(|family| Job { setup: Setup { family, ..like.clone() }, at_least: 0 })
            .collect()
    } else {
        all()
    };
    Ok(Args { jobs, walks, json, one, limit, outcomes })
}

/// The most memory that this process has used, in MB.
fn peak_mb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kb = status.lines().find_map(|l| l.strip_prefix("VmHWM:")).and_then(|l| l.split_whitespace().next());
    kb.and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) / 1024
}

fn show(json: bool, name: &str, r: &Report, ok: bool) {
    let word = if r.complete { "complete" } else { "NOT COMPLETE" };
    if json {
        println!(
            "{{\"world\":\"{name}\",\"states\":{},\"transitions\":{},\"ends\":{},\"deepest\":{},\"seconds\":{:.1},\"peak_mb\":{},\"complete\":{},\"ok\":{ok}}}",
            r.states,
            r.transitions,
            r.ends,
            r.deepest,
            r.took.as_secs_f64(),
            peak_mb(),
            r.complete
        );
    } else {
        println!(
            "{name:<82} {:>11} states {:>12} transitions {:>7} ends {:>4} deep {:>7.1} s {:>6} MB  {word}",
            r.states,
            r.transitions,
            r.ends,
            r.deepest,
            r.took.as_secs_f64(),
            peak_mb()
        );
    }
    if let Some(c) = &r.found {
        eprintln!("{name}: {}", c.clone().shortened());
    }
}

fn staging() -> bool {
    match explore_staging(None, 2) {
        Ok(r) => {
            println!(
                "staging slots: {} states, {} transitions, complete: {}",
                r.states, r.transitions, r.complete
            );
            if !r.complete {
                eprintln!("{:#?}", r.found);
            }
            r.complete
        }
        Err(e) => {
            eprintln!("{e}");
            false
        }
    }
}

fn walks(family: Family, faults: u8, seeds: u64) -> bool {
    let setup = Setup { pieces: 2, ..Setup::new(family, faults) };
    match walk(&setup, 0..seeds) {
        Ok(w) => {
            println!(
                "{}: {} walks with up to {faults} faults, {} steps, {} faults, {:.1} s",
                family.name(),
                w.walks,
                w.steps,
                w.faults,
                w.took.as_secs_f64()
            );
            if let Some((seed, c)) = &w.found {
                eprintln!("seed {seed}: {}", c.clone().shortened());
            }
            w.found.is_none()
        }
        Err(e) => {
            eprintln!("{e}");
            false
        }
    }
}

fn world(job: &Job, args: &Args) -> bool {
    let progress = |r: &Report| {
        if !args.json {
            let seconds = r.took.as_secs_f64();
            eprintln!("  {}: {} M states, {seconds:.0} s", job.name(), r.states / 1_000_000);
        }
    };
    match explore_and_tell(&job.setup, args.limit, progress) {
        Ok(r) => {
            let ok = r.complete && r.states >= job.at_least;
            show(args.json, &job.name(), &r, ok);
            if args.outcomes {
                r.outcomes.iter().for_each(|o| println!("    {o}"));
            }
            ok
        }
        Err(e) => {
            eprintln!("{}: {e}", job.name());
            false
        }
    }
}

enum Task<'a> {
    World(&'a Job),
    Staging,
    Walks(Family, u8),
}

fn main() -> ExitCode {
    let args = match parse() {
        Ok(args) => args,
        Err(e) => {
            eprintln!("model_check: {e}");
            return ExitCode::from(2);
        }
    };
    let began = Instant::now();
    let mut tasks: Vec<Task> = args.jobs.iter().map(Task::World).collect();
    if !args.one {
        tasks.push(Task::Staging);
    }
    for family in Family::ALL.into_iter().filter(|_| args.walks > 0) {
        tasks.extend((2..=5).map(|faults| Task::Walks(family, faults)));
    }
    let queue = Mutex::new(tasks.into_iter());
    let good = AtomicBool::new(true);
    let threads = std::thread::available_parallelism().map_or(2, usize::from).min(2);
    std::thread::scope(|s| {
        for _ in 0..threads {
            s.spawn(|| {
                // `while let` would hold the lock for the whole of its body.
                #[allow(clippy::while_let_loop)]
                loop {
                    let Some(task) = queue.lock().ok().and_then(|mut q| q.next()) else { break };
                    let ok = match task {
                        Task::World(job) => world(job, &args),
                        Task::Staging => staging(),
                        Task::Walks(family, faults) => walks(family, faults, args.walks),
                    };
                    good.fetch_and(ok, Ordering::Relaxed);
                }
            });
        }
    });
    println!("{:.1} s in all, {} MB at most", began.elapsed().as_secs_f64(), peak_mb());
    if good.into_inner() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
