//! What this host takes to wake three threads one after the other, as the smallest hand-off has to: the caller wakes a thread by
//! an eventfd, that one the next by a byte over TCP, and that one a poller by an eventfd. Nothing of kvxfer is in it: no hand-off
//! from idle can take less. `cargo run --release -p kvxfer-engine --example wake_chain`

#![allow(clippy::print_stdout)]

use rustix::event::{EventfdFlags, eventfd};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const ROUNDS: usize = 300;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    let (order, event) = (eventfd(0, EventfdFlags::CLOEXEC)?, eventfd(0, EventfdFlags::CLOEXEC)?);
    for idle in [Duration::from_micros(200), Duration::from_millis(2)] {
        let mut times = std::thread::scope(|scope| -> std::io::Result<Vec<Duration>> {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    let mut word = [0u8; 8];
                    if rustix::io::read(&order, &mut word).is_err() || near.write_all(&[1]).is_err() {
                        return;
                    }
                }
            });
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    if far.read_exact(&mut [0u8; 1]).is_err()
                        || rustix::io::write(&event, &1u64.to_ne_bytes()).is_err()
                    {
                        return;
                    }
                }
            });
            // Who waits for the event is not who gives the order, in a hand-off; here it is, and sleeps as well.
            let mut times = Vec::with_capacity(ROUNDS);
            for _ in 0..ROUNDS {
                std::thread::sleep(idle);
                let began = Instant::now();
                rustix::io::write(&order, &1u64.to_ne_bytes())?;
                rustix::io::read(&event, &mut [0u8; 8])?;
                times.push(began.elapsed());
            }
            Ok(times)
        })?;
        times.sort_unstable();
        let rank =
            |percent: usize| times.get(times.len() * percent / 100).map_or(0.0, |t| t.as_secs_f64() * 1e6);
        println!("idle for {idle:?}: three wakes take {:.0} us, p99 {:.0}", rank(50), rank(99));
    }
    Ok(())
}
