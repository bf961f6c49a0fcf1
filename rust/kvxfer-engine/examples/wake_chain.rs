//! What this host takes for the smallest hand-off with nothing of kvxfer in it: a caller wakes a thread by an eventfd, that one
//! and another send each other as many small messages over TCP as a fabric needs (one where the sender writes, three where the
//! receiver copies: `Ready`, `Copied`, `Done`), and the last of them wakes a poller by an eventfd. No hand-off can take less.
//! With "spinning" the two threads never sleep, each on a core of its own where there are two, and yield it in each round, as
//! kvxfer's do. `cargo run --release -p kvxfer-engine --example wake_chain`

#![allow(clippy::print_stdout)]

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity, sched_yield};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const ROUNDS: usize = 300;

/// One of the two threads.
struct End {
    stream: TcpStream,
    spins: bool,
}

impl End {
    /// Reads, and reads again until there is something.
    fn wait(&self, mut read: impl FnMut() -> std::io::Result<()>) -> std::io::Result<()> {
        loop {
            match read() {
                Err(e) if self.spins && e.kind() == ErrorKind::WouldBlock => sched_yield(),
                done => return done,
            }
        }
    }

    fn receive(&self) -> std::io::Result<()> {
        let mut stream = &self.stream;
        self.wait(|| stream.read_exact(&mut [0u8; 1]))
    }

    fn send(&self) -> std::io::Result<()> {
        (&self.stream).write_all(&[1])
    }
}

fn take(event: &OwnedFd) -> std::io::Result<()> {
    rustix::io::read(event, &mut [0u8; 8])?;
    Ok(())
}

fn raise(event: &OwnedFd) -> std::io::Result<()> {
    rustix::io::write(event, &1u64.to_ne_bytes())?;
    Ok(())
}

/// Gives the calling thread the `n`-th core that there is.
fn pin(n: usize) -> std::io::Result<()> {
    let all = sched_getaffinity(None)?;
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)).collect();
    if let Some(cpu) = cores.get(n).filter(|_| cores.len() > 1) {
        let mut one = CpuSet::new();
        one.set(*cpu);
        sched_setaffinity(None, &one)?;
    }
    Ok(())
}

fn measure(
    messages: usize,
    spins: bool,
    idle: Duration,
) -> Result<Vec<Duration>, Box<dyn std::error::Error>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    for stream in [&near, &far] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(spins)?;
    }
    let flags = if spins { EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK } else { EventfdFlags::CLOEXEC };
    let (order, event) = (eventfd(0, flags)?, eventfd(0, EventfdFlags::CLOEXEC)?);
    let sender = End { stream: near, spins };
    let receiver = End { stream: far, spins };
    let times = std::thread::scope(|scope| {
        let one = scope.spawn(|| -> std::io::Result<()> {
            if spins {
                pin(0)?;
            }
            for _ in 0..ROUNDS {
                sender.wait(|| take(&order))?;
                sender.send()?;
                for _ in 0..messages / 2 {
                    sender.receive()?;
                    sender.send()?;
                }
            }
            Ok(())
        });
        let other = scope.spawn(|| -> std::io::Result<()> {
            if spins {
                pin(1)?;
            }
            for _ in 0..ROUNDS {
                receiver.receive()?;
                for _ in 0..messages / 2 {
                    receiver.send()?;
                    receiver.receive()?;
                }
                raise(&event)?;
            }
            Ok(())
        });
        // Who waits for the event is not who gives the order, in a hand-off; here it is, and sleeps as well.
        let mut times = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            std::thread::sleep(idle);
            let began = Instant::now();
            raise(&order)?;
            take(&event)?;
            times.push(began.elapsed());
        }
        for thread in [one, other] {
            thread.join().map_err(|_| std::io::Error::other("a thread panicked"))??;
        }
        Ok::<_, std::io::Error>(times)
    })?;
    Ok(times)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for (spins, idle) in [(false, 200), (false, 2000), (true, 2000)] {
        for messages in [1, 3] {
            let mut times = measure(messages, spins, Duration::from_micros(idle))?;
            times.sort_unstable();
            let rank = |percent: usize| {
                times.get(times.len() * percent / 100).map_or(0.0, |t| t.as_secs_f64() * 1e6)
            };
            let how = if spins { "spinning" } else { "sleeping" };
            println!(
                "{how}, idle for {idle} us, messages: {messages}: {:.0} us, p99 {:.0}",
                rank(50),
                rank(99)
            );
        }
    }
    Ok(())
}
