//! Starting the transfer thread, and its loop.

use crate::config::{AgentConfig, StartError};
use crate::driver::Driver;
use crate::shared::Shared;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;

/// How much later than asked the thread may be woken.
const TIMER_SLACK_NS: u64 = 5_000;

/// What the caller learns of a started thread.
pub(crate) struct Started {
    pub(crate) handle: JoinHandle<()>,
    pub(crate) address: String,
    pub(crate) fabrics: String,
}

/// Starts the thread and waits until it is set up. Fabrics are made on it: they belong to one thread.
pub(crate) fn start(config: AgentConfig, shared: Arc<Shared>) -> Result<Started, StartError> {
    let (tell, told) = sync_channel(1);
    // Linux shows 15 bytes of a thread's name.
    let name: String = format!("kvx-{}", config.name).chars().take(15).collect();
    let work = move || {
        let all = Arc::clone(&shared);
        // Naps are of 50 us, and the kernel's default is to let each be 50 us longer.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(TIMER_SLACK_NS));
        let set_up = pin(config.cpu).and_then(|()| Driver::new(&config, shared));
        match set_up {
            Ok(mut driver) => {
                let _ = tell.send(Ok((driver.address(), driver.fabrics())));
                let ran = catch_unwind(AssertUnwindSafe(|| driver.run()));
                if ran.is_err() {
                    all.thread_died();
                    // Callers must learn of it: nobody would answer them.
                    let _ = catch_unwind(AssertUnwindSafe(|| driver.died()));
                }
                all.end_orders(crate::clock::now().0);
            }
            Err(e) => {
                let _ = tell.send(Err(e));
            }
        }
    };
    let handle = std::thread::Builder::new()
        .name(name)
        .spawn(work)
        .map_err(|e| StartError::Os { call: "thread", why: e.to_string() })?;
    match told.recv() {
        Ok(Ok((address, fabrics))) => Ok(Started { handle, address, fabrics }),
        Ok(Err(e)) => {
            let _ = handle.join();
            Err(e)
        }
        Err(_) => Err(StartError::Os {
            call: "thread",
            why: "the transfer thread ended while it was set up".to_owned(),
        }),
    }
}

/// Pins the calling thread before it allocates anything, so that its memory is near.
fn pin(cpu: Option<usize>) -> Result<(), StartError> {
    let Some(cpu) = cpu else { return Ok(()) };
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(StartError::BadArgument(format!("cpu {cpu} does not exist")));
    }
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).map_err(|e| {
        StartError::BadArgument(format!("the transfer thread cannot be pinned to cpu {cpu}: {e}"))
    })
}
