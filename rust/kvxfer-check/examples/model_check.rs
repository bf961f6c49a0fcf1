//! quick
#![allow(clippy::print_stdout, clippy::unwrap_used)]
use kvxfer_check::model::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let family = Family::from_name(&a[1]).unwrap();
    let mut s = Setup::new(family, a[2].parse().unwrap());
    if let Some(k) = a.get(4) && k != "-" { s.kinds = FaultKind::ALL.into_iter().filter(|f| k.split(',').any(|x| x == f.name())).collect(); }
    if let Some(k) = a.get(5) { s.flaw = kvxfer_proto::node::Flaw::from_name(k); }
    if let Some(k) = a.get(6) { s.sources = k.parse().unwrap(); }
    s.prompt = a.get(7).is_some_and(|x| x == "prompt");
    let r = explore(&s, a[3].parse().unwrap()).unwrap();
    println!("{family:?} complete={} states={} trans={} ends={} by={:?} deepest={} {:?}", r.complete, r.states, r.transitions, r.ends, r.by_faults, r.deepest, r.took);
    if let Some(c) = r.found {
        let n = c.steps.len();
        if n > 300 { println!("{c}"); } else { println!("{n} steps, shortened:\n{}", c.shortened()); }
    }
}
