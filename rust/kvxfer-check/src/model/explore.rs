//! Walking all of a world's states, or a random path.

use super::apart::Apart;
use super::fp::{PrintMap, Prints};
use super::steps::Step;
use super::world::{Setup, World};
use super::{Property, Violation};
use kvxfer_proto::LayoutError;
use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::time::{Duration, Instant};

/// A path to something that must never happen.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Counterexample {
    /// The world in which it was found.
    pub setup: Setup,
    /// The way there.
    pub steps: Vec<Step>,
    /// What happened.
    pub violation: Violation,
}

impl Counterexample {
    /// Walks the path again. Returns what is violated at its end, if anything is, and the steps in words.
    ///
    /// # Errors
    /// When the geometry is not valid.
    pub fn replay(&self) -> Result<(Option<Violation>, Vec<String>), LayoutError> {
        let mut w = World::new(self.setup.clone())?;
        let mut words = Vec::new();
        for step in &self.steps {
            words.push(w.describe(step));
            let next = Some(step).filter(|s| w.steps().contains(s)).and_then(|s| w.after(s));
            let Some(next) = next else { return Ok((None, words)) };
            w = next;
            if w.violation.is_some() {
                return Ok((w.violation, words));
            }
        }
        let steps = w.steps();
        let end = if w.is_end(&steps) { w.check_end() } else { None };
        Ok((end, words))
    }

    /// The same violation on a path with fewer steps, if leaving steps out leads to it.
    #[must_use]
    pub fn shortened(mut self) -> Self {
        let mut at = self.steps.len();
        while at > 0 {
            at -= 1;
            let mut shorter = self.clone();
            shorter.steps.remove(at);
            if let Ok((Some(v), words)) = shorter.replay()
                && v.property == self.violation.property
            {
                shorter.steps.truncate(words.len());
                shorter.violation = v;
                self = shorter;
                at = at.min(self.steps.len());
            }
        }
        self
    }
}

impl fmt::Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}", self.violation.property, self.violation.text)?;
        let words = self.replay().map(|(_, words)| words).unwrap_or_default();
        for (i, step) in words.iter().enumerate() {
            writeln!(f, "{:4}. {step}", i + 1)?;
        }
        Ok(())
    }
}

/// What an exploration found.
#[derive(Clone, Debug)]
pub struct Report {
    /// Every state was visited, and nothing was found.
    pub complete: bool,
    /// States.
    pub states: u64,
    /// Of these, states of the destination and one source whose business is apart from the other's.
    pub apart: u64,
    /// Steps between states.
    pub transitions: u64,
    /// States in which nothing happens any more.
    pub ends: u64,
    /// How the rooms stood in those, and which processes: each way once.
    pub outcomes: BTreeSet<String>,
    /// States by faults that had happened.
    pub by_faults: Vec<u64>,
    /// Steps on the longest path that was walked.
    pub deepest: usize,
    /// How long it took.
    pub took: Duration,
    /// What was found.
    pub found: Option<Counterexample>,
}

struct Level {
    world: World,
    print: u128,
    /// With the states after them where those are known.
    steps: Vec<(Step, Option<World>)>,
    next: usize,
}

impl Level {
    fn new(world: World, print: u128) -> Self {
        let steps = world.steps_to_walk();
        Self { world, print, steps, next: 0 }
    }
}

/// Steps that no path comes near: one that is longer goes on for ever, with counters that rise.
pub(super) const LONGEST: usize = 400;

/// States after which the walk tells how far it has come.
const TELL_EVERY: u64 = 1_000_000;

/// Walks every state, depth first. There is no bound on the depth: a path that comes back to a state of its own never
/// ends, and is reported.
///
/// # Errors
/// When the geometry is not valid.
pub fn explore(setup: &Setup, limit: u64) -> Result<Report, LayoutError> {
    explore_and_tell(setup, limit, |_| ())
}

/// The same, and tells how far it has come every million states.
///
/// # Errors
/// When the geometry is not valid.
pub fn explore_and_tell(
    setup: &Setup,
    limit: u64,
    mut tell: impl FnMut(&Report),
) -> Result<Report, LayoutError> {
    let began = Instant::now();
    let root = World::new(setup.clone())?;
    let mut visited = Prints::default();
    let mut on_path = Prints::default();
    let mut report = Report {
        complete: false,
        states: 1,
        apart: 0,
        transitions: 0,
        ends: 0,
        outcomes: BTreeSet::new(),
        by_faults: vec![0; usize::from(setup.faults) + 1],
        deepest: 0,
        took: Duration::ZERO,
        found: None,
    };
    let mut apart = Apart::new(&root);
    let print = root.fingerprint();
    visited.insert(print);
    on_path.insert(print);
    let mut path = vec![Level::new(root, print)];
    let mut wrong = None;
    let mut tell_at = TELL_EVERY;
    while let Some(level) = path.last_mut() {
        if level.next == 0 {
            report.by_faults[usize::from(setup.faults - level.world.faults_left)] += 1;
            if level.world.is_end(level.steps.iter().map(|(s, _)| s)) {
                report.ends += 1;
                report.outcomes.insert(level.world.outcome());
                wrong = level.world.check_end();
            }
        }
        if wrong.is_some() || report.states >= limit {
            break;
        }
        let Some((step, ready)) = level.steps.get_mut(level.next) else {
            on_path.remove(&level.print);
            path.pop();
            continue;
        };
        level.next += 1;
        let Some(next) = ready.take().or_else(|| level.world.after(step)) else { continue };
        report.transitions += 1;
        if next.violation.is_some() {
            wrong = next.violation;
            break;
        }
        let print = next.fingerprint();
        if !visited.insert(print) {
            if on_path.contains(&print) && setup.checks(Property::EveryPathEnds) {
                let text = "a path comes back to where it was, and goes on for ever".to_owned();
                wrong = Some(Violation { property: Property::EveryPathEnds, text });
                break;
            }
            continue;
        }
        report.states += 1;
        let is_well = next.is_apart() && apart.walk(&next, &mut report.outcomes);
        report.states += apart.states - report.apart;
        report.apart = apart.states;
        if report.states >= tell_at {
            report.took = began.elapsed();
            tell(&report);
            tell_at = report.states + TELL_EVERY;
        }
        if is_well {
            report.by_faults[usize::from(setup.faults - next.faults_left)] += 1;
            continue;
        }
        on_path.insert(print);
        path.push(Level::new(next, print));
        report.deepest = report.deepest.max(path.len() - 1);
        if path.len() > LONGEST && setup.checks(Property::EveryPathEnds) {
            let text = format!("a path of more than {LONGEST} steps: something counts up for ever");
            wrong = Some(Violation { property: Property::EveryPathEnds, text });
            break;
        }
    }
    report.transitions += apart.transitions;
    report.ends += apart.ends;
    report.took = began.elapsed();
    report.complete = path.is_empty() && wrong.is_none();
    report.found = wrong.map(|violation| {
        let steps = path
            .iter()
            .filter_map(|l| Some(l.steps.get(l.next.checked_sub(1)?)?.0.clone()))
            .flat_map(Step::plainly)
            .collect();
        Counterexample { setup: setup.clone(), steps, violation }
    });
    Ok(report)
}

/// Walks breadth first until something is found: the counterexample is then a shortest one. Gives up after `limit`
/// states.
///
/// # Errors
/// When the geometry is not valid.
pub fn shortest(setup: &Setup, limit: u64) -> Result<Report, LayoutError> {
    let began = Instant::now();
    let root = World::new(setup.clone())?;
    let mut known: PrintMap<()> = PrintMap::default();
    let mut parents: Vec<(usize, Option<Step>)> = vec![(0, None)];
    let mut queue = VecDeque::from([(root, 0usize, 0usize)]);
    let mut report = Report {
        complete: false,
        states: 1,
        apart: 0,
        transitions: 0,
        ends: 0,
        outcomes: BTreeSet::new(),
        by_faults: vec![0; usize::from(setup.faults) + 1],
        deepest: 0,
        took: Duration::ZERO,
        found: None,
    };
    let mut wrong = None;
    'walk: while let Some((world, me, depth)) = queue.pop_front() {
        report.by_faults[usize::from(setup.faults - world.faults_left)] += 1;
        report.deepest = depth;
        let steps = world.steps();
        if world.is_end(&steps) {
            report.ends += 1;
            report.outcomes.insert(world.outcome());
            if let Some(v) = world.check_end() {
                wrong = Some((me, None, v));
                break;
            }
        }
        for step in steps {
            let Some(next) = world.after(&step) else { continue };
            report.transitions += 1;
            if let Some(v) = next.violation {
                wrong = Some((me, Some(step), v));
                break 'walk;
            }
            if known.insert(next.fingerprint(), ()).is_some() {
                continue;
            }
            report.states += 1;
            parents.push((me, Some(step)));
            queue.push_back((next, parents.len() - 1, depth + 1));
        }
        if report.states >= limit {
            break;
        }
    }
    report.took = began.elapsed();
    report.complete = queue.is_empty() && wrong.is_none();
    report.found = wrong.map(|(mut at, last, violation)| {
        let mut steps: Vec<Step> = last.into_iter().collect();
        while let Some((parent, Some(step))) = parents.get(at).cloned() {
            steps.push(step);
            at = parent;
        }
        steps.reverse();
        Counterexample { setup: setup.clone(), steps, violation }
    });
    Ok(report)
}

/// A small seeded generator.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        usize::try_from(z % (n.max(1) as u64)).unwrap_or(0)
    }
}

/// What random walks found.
#[derive(Clone, Debug)]
pub struct Walks {
    /// Walks that were made, each to its end.
    pub walks: u64,
    /// Steps in all.
    pub steps: u64,
    /// Faults in all.
    pub faults: u64,
    /// How long it took.
    pub took: Duration,
    /// What the first seed found that found anything.
    pub found: Option<(u64, Counterexample)>,
}

/// Steps of one walk, far above what any path takes.
const WALK_LIMIT: usize = 100_000;

/// Walks one random path for each seed, each to its end. The same seed gives the same path.
///
/// # Errors
/// When the geometry is not valid.
pub fn walk(setup: &Setup, seeds: std::ops::Range<u64>) -> Result<Walks, LayoutError> {
    let began = Instant::now();
    let root = World::new(setup.clone())?;
    let mut out = Walks { walks: 0, steps: 0, faults: 0, took: Duration::ZERO, found: None };
    for seed in seeds {
        let mut rng = Rng(seed.wrapping_mul(0xD134_2543_DE82_EF95));
        // Faults early on most paths leave nothing to break: some seeds wait with them.
        let patience = 2 + rng.below(40);
        let mut w = root.clone();
        let mut path = Vec::new();
        let mut wrong = None;
        loop {
            let steps = w.steps();
            if w.is_end(&steps) {
                wrong = w.check_end();
                if wrong.is_some() || steps.iter().all(|s| s.fault().is_some()) || rng.below(2) == 0 {
                    break;
                }
            }
            let faulty = rng.below(patience) == 0;
            let choice: Vec<&Step> = steps.iter().filter(|s| s.fault().is_some() == faulty).collect();
            let Some(step) = choice.get(rng.below(choice.len())).copied().or_else(|| steps.first()) else {
                break;
            };
            out.faults += u64::from(step.fault().is_some());
            path.push(step.clone());
            let Some(next) = w.after(step) else { break };
            w = next;
            if w.violation.is_some() || path.len() > WALK_LIMIT {
                wrong = w.violation.or_else(|| {
                    let text = format!("more than {WALK_LIMIT} steps");
                    Some(Violation { property: Property::EveryPathEnds, text })
                });
                break;
            }
        }
        out.walks += 1;
        out.steps += path.len() as u64;
        if let Some(violation) = wrong {
            out.found = Some((seed, Counterexample { setup: setup.clone(), steps: path, violation }));
            break;
        }
    }
    out.took = began.elapsed();
    Ok(out)
}
