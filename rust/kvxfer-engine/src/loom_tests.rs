//! Every interleaving of callers and the transfer thread, by loom: `make test-loom`.
//!
//! What runs here is the code of `queue`, `rooms`, `shared` and `table`; the thread's own loop is shortened to what it
//! does with them. A wait that nobody ends is a deadlock to loom, and fails the test. Each protocol is also run with one
//! step taken out of it ([`Fault`]), and loom has to find the harm: else the test could not fail.
//!
//! Threads may be preempted at most [`PREEMPTIONS`] times in one run, beside the switches where one waits: without a bound
//! the larger models take hours. Every fault here is found within it; one of them needs all three.

use crate::primitive::{Fault, Signal, with_fault};
use crate::queue::{Events, Order, Orders};
use crate::rooms::{AgentEvent, RoomShared};
use crate::shared::Shared;
use crate::table::Table;
use kvxfer_proto::node::EventKind;
use kvxfer_proto::{Reason, ReasonKind, Room};
use loom::thread::{JoinHandle, spawn};
use std::sync::Arc;

const PREEMPTIONS: usize = 3;

fn model(fault: Option<Fault>, run: impl Fn() + Sync + Send + 'static) {
    with_fault(fault, || {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(PREEMPTIONS);
        builder.check(run);
    });
}

/// One test that the protocol holds, and one for each fault that loom finds it broken.
macro_rules! protocol {
    ($name:ident, $run:expr, { $($fault:ident: $broken:ident => $words:literal),* $(,)? }) => {
        #[test]
        fn $name() {
            model(None, $run);
        }
        $(
            #[test]
            #[should_panic(expected = $words)]
            fn $broken() {
                model(Some(Fault::$fault), $run);
            }
        )*
    };
}

fn room(n: u64) -> Room {
    Room::new(n).unwrap()
}

fn success(n: u64) -> AgentEvent {
    let mut event = AgentEvent::released(room(n));
    event.kind = EventKind::Success;
    event
}

/// An order that begins a room.
fn open(n: u64, shared: &Arc<RoomShared>) -> Order {
    Order::Open(room(n), None, None, Arc::clone(shared))
}

/// An order that begins none.
fn cancel(room: Room) -> Order {
    Order::Cancel(room, Arc::new(RoomShared::new(true)))
}

fn number(order: &Order) -> u64 {
    match order {
        Order::Open(room, ..) | Order::Cancel(room, _) => room.get(),
        _ => panic!("no other order is given here: {order:?}"),
    }
}

/// The transfer thread until it has taken so many orders; it sleeps when there is none.
fn take(orders: &Orders, count: usize) -> Vec<u64> {
    let mut taken = Vec::new();
    while taken.len() < count {
        match orders.take() {
            Some(order) => taken.push(number(&order)),
            None => {
                orders.sleep(false, || orders.signal.wait());
            }
        }
    }
    taken
}

// Whoever queues an order either finds the thread asleep and wakes it, or the thread finds the order.
protocol!(an_order_never_finds_the_thread_asleep_for_good, || {
    let orders = Arc::new(Orders::new(2).unwrap());
    let callers: Vec<JoinHandle<()>> = (1..=2)
        .map(|n| {
            let orders = Arc::clone(&orders);
            spawn(move || orders.submit(cancel(room(n))).unwrap())
        })
        .collect();
    let mut taken = take(&orders, 2);
    taken.sort_unstable();
    assert_eq!(taken, [1, 2]);
    for caller in callers {
        caller.join().unwrap();
    }
}, {
    SubmitWithoutWake: loom_sees_that_a_submit_must_wake => "deadlock",
    SubmitWithoutFence: loom_sees_that_a_submit_needs_its_fence => "deadlock",
    SleepWithoutLook: loom_sees_that_a_sleeper_must_look_again => "deadlock",
    SleepWithoutFence: loom_sees_that_a_sleeper_needs_its_fence => "deadlock",
    ClearAfterLook: loom_sees_that_the_signal_is_cleared_before_the_look => "deadlock",
});

// A refused order comes back to its caller, and every other is taken once.
protocol!(a_full_queue_refuses_and_loses_nothing, || {
    let orders = Arc::new(Orders::new(1).unwrap());
    let callers: Vec<JoinHandle<Option<u64>>> = (1..=2)
        .map(|n| {
            let orders = Arc::clone(&orders);
            spawn(move || match orders.submit(cancel(room(n))) {
                Ok(()) => Some(n),
                Err(order) => {
                    assert_eq!(number(&order), n, "the caller's own order");
                    None
                }
            })
        })
        .collect();
    // One of the two finds a place whatever happens.
    let mut taken = take(&orders, 1);
    let mut accepted: Vec<u64> = callers.into_iter().filter_map(|c| c.join().unwrap()).collect();
    while let Some(order) = orders.take() {
        taken.push(number(&order));
    }
    taken.sort_unstable();
    accepted.sort_unstable();
    assert_eq!(taken, accepted);
}, {
    SubmitWithoutWake: loom_sees_that_a_full_queue_must_be_emptied => "deadlock",
});

// Closing needs no place in the queue.
protocol!(closing_wakes_the_thread_with_a_full_queue_too, || {
    let orders = Arc::new(Orders::new(1).unwrap());
    let shared = Arc::new(RoomShared::new(true));
    orders.submit(open(1, &shared)).unwrap();
    let closer = {
        let orders = Arc::clone(&orders);
        spawn(move || orders.close())
    };
    let mut taken = 0;
    while !orders.is_closed() {
        if orders.take().is_some() {
            taken += 1;
        } else {
            orders.sleep(false, || orders.signal.wait());
        }
    }
    closer.join().unwrap();
    taken += usize::from(orders.take().is_some());
    assert_eq!(taken, 1);
}, {
    CloseWithoutWake: loom_sees_that_closing_must_wake => "deadlock",
    SleepWithoutLookForClose: loom_sees_that_a_sleeper_must_look_for_the_close => "deadlock",
});

/// Polls, now and whenever the descriptor says so, until there were so many events.
fn poll(events: &Events, count: usize) {
    let mut seen = 0;
    events.drain(|_| seen += 1);
    while seen < count {
        events.signal.wait();
        // Without a pause when there was nothing: an event loop must not spin until a push goes on.
        events.drain(|_| seen += 1);
    }
    assert_eq!(seen, count);
}

// The descriptor is readable while there is something. Once nothing is left, one more poll at most makes it unreadable, and
// the next event makes it readable again.
protocol!(the_descriptor_of_events_tells_the_truth, || {
    let events = Arc::new(Events::new().unwrap());
    let pushers: Vec<JoinHandle<()>> = (1..=2)
        .map(|n| {
            let events = Arc::clone(&events);
            spawn(move || events.push(success(n)))
        })
        .collect();
    poll(&events, 2);
    for pusher in pushers {
        pusher.join().unwrap();
    }
    events.drain(|event| panic!("there was no third event: {event:?}"));
    assert!(!events.signal.is_readable(), "readable for nothing");
    events.push(success(3));
    assert!(events.signal.is_readable(), "unreadable in spite of an event");
}, {
    ReadableTooEarly: loom_sees_a_descriptor_that_stays_readable_for_nothing => "maximum number of branches",
    UnreadableTooEarly: loom_sees_a_descriptor_cleared_after_it_was_raised => "readable",
    ClearAfterTaking: loom_sees_an_event_behind_a_cleared_descriptor => "deadlock",
    RaiserIgnoresPoll: loom_sees_a_push_that_ignores_a_poll => "",
});

// Two threads that poll share the events; none is lost and none comes twice.
protocol!(two_polls_at_once_share_the_events, || {
    let events = Arc::new(Events::new().unwrap());
    events.push(success(1));
    let other = {
        let events = Arc::clone(&events);
        spawn(move || {
            let mut seen = 0;
            events.drain(|_| seen += 1);
            seen
        })
    };
    let pusher = {
        let events = Arc::clone(&events);
        spawn(move || events.push(success(2)))
    };
    let mut seen = 0;
    events.drain(|_| seen += 1);
    seen += other.join().unwrap();
    pusher.join().unwrap();
    assert!(seen == 2 || events.signal.is_readable(), "unreadable in spite of an event");
    events.drain(|_| seen += 1);
    assert_eq!(seen, 2);
    events.drain(|_| panic!("there was no third event"));
    assert!(!events.signal.is_readable(), "readable for nothing");
}, {
    UnreadableTooEarly: loom_sees_that_two_polls_need_the_order_of_clearing => "readable",
});

// Whoever waits for a room wakes at its end, and finds the event in the queue.
protocol!(a_wait_ends_with_the_room_and_finds_its_event, || {
    let shared = Arc::new(Shared::new(1).unwrap());
    let entry = Arc::new(RoomShared::new(true));
    let waiter = {
        let (shared, entry) = (Arc::clone(&shared), Arc::clone(&entry));
        spawn(move || {
            assert!(entry.wait(None).is_some());
            let mut seen = 0;
            shared.events.drain(|_| seen += 1);
            assert_eq!(seen, 1, "the wait was over before the event was there");
        })
    };
    shared.tell(success(1), Some(&entry));
    waiter.join().unwrap();
}, {
    PublishWithoutLock: loom_sees_a_wait_that_misses_the_end => "deadlock",
});

// An event loop that begins to wait sees the room's end by its own look, or its descriptor tells it.
protocol!(an_event_loop_misses_no_end, || {
    let shared = Arc::new(Shared::new(1).unwrap());
    let entry = Arc::new(RoomShared::new(true));
    let waiter = {
        let (shared, entry) = (Arc::clone(&shared), Arc::clone(&entry));
        spawn(move || {
            let signal = Arc::new(Signal::new().unwrap());
            shared.waiters.add(Arc::clone(&signal));
            while entry.published().is_none() {
                signal.wait();
                signal.clear();
            }
            shared.waiters.remove(&signal);
        })
    };
    shared.tell(success(1), Some(&entry));
    waiter.join().unwrap();
}, {
    RaiseWithoutFence: loom_sees_that_the_look_for_event_loops_needs_its_fence => "deadlock",
});

/// Takes every event there is; each room must have one end at most.
fn ends(shared: &Shared, ended: &mut Vec<u64>) {
    shared.events.drain(|event| {
        assert!(!ended.contains(&event.room.get()), "room {} has ended twice", event.room);
        ended.push(event.room.get());
    });
}

// An order that was taken while the agent ends is carried out or answered: nobody waits for it for ever.
protocol!(no_order_is_lost_when_the_thread_ends, || {
    let shared = Arc::new(Shared::new(2).unwrap());
    let callers: Vec<JoinHandle<()>> = (1..=2)
        .map(|n| {
            let shared = Arc::clone(&shared);
            spawn(move || {
                let entry = Arc::new(RoomShared::new(true));
                if shared.submit(open(n, &entry), || 0).is_ok() {
                    let end = entry.wait(None).unwrap();
                    assert_eq!(end.error().unwrap().kind, ReasonKind::Closed);
                }
            })
        })
        .collect();
    shared.end_orders(0);
    for caller in callers {
        caller.join().unwrap();
    }
    let mut ended = Vec::new();
    ends(&shared, &mut ended);
    assert_eq!(ended.len(), 2);
}, {
    SubmitWithoutLookForEnd: loom_sees_an_order_that_nobody_answers => "deadlock",
    EndAfterDrain: loom_sees_an_order_behind_the_last_look => "deadlock",
});

/// The transfer thread, shortened: it carries orders out at once, and on a close fails what is under way.
fn transfer_thread(shared: &Shared) {
    let mut rooms: Vec<(Room, Arc<RoomShared>)> = Vec::new();
    loop {
        while let Some(order) = shared.orders.take() {
            match order {
                Order::Open(room, _, _, entry) => rooms.push((room, entry)),
                Order::Cancel(room, _) => {
                    if let Some(at) = rooms.iter().position(|(r, _)| *r == room) {
                        let (_, entry) = rooms.remove(at);
                        let mut event = AgentEvent::released(room);
                        event.kind = EventKind::Failed(Reason::new(ReasonKind::Cancelled, "cancelled"));
                        shared.tell(event, Some(&entry));
                    }
                }
                other => panic!("no other order is given here: {other:?}"),
            }
        }
        if shared.orders.is_closed() {
            let reason = Reason::new(ReasonKind::Closed, "the agent was closed");
            for (room, entry) in rooms.drain(..) {
                shared.fail_room(room, &entry, &reason, false, 0);
            }
            break;
        }
        shared.orders.sleep(false, || shared.orders.signal.wait());
    }
    shared.end_orders(0);
}

// Expect, cancel, wait, poll and close at once: every room whose order was taken ends once, and every wait ends.
protocol!(closing_while_others_call_ends_every_room_once, || {
    let shared = Arc::new(Shared::new(2).unwrap());
    let thread = {
        let shared = Arc::clone(&shared);
        spawn(move || transfer_thread(&shared))
    };
    let caller = {
        let shared = Arc::clone(&shared);
        spawn(move || {
            let entry = Arc::new(RoomShared::new(true));
            if shared.orders.is_closed() || shared.submit(open(1, &entry), || 0).is_err() {
                return 0;
            }
            let _ = shared.submit(cancel(room(1)), || 0);
            assert!(entry.wait(None).unwrap().error().is_some());
            1
        })
    };
    shared.orders.close();
    let mut ended = Vec::new();
    ends(&shared, &mut ended);
    let accepted = caller.join().unwrap();
    thread.join().unwrap();
    ends(&shared, &mut ended);
    assert_eq!(ended.len(), accepted);
    // Nothing is taken by anybody afterwards that is not answered.
    let late = Arc::new(RoomShared::new(true));
    shared.submit(open(9, &late), || 0).unwrap();
    assert_eq!(late.wait(None).unwrap().error().unwrap().kind, ReasonKind::Closed);
}, {
    SubmitWithoutLookForEnd: loom_sees_a_caller_left_behind_by_a_close => "deadlock",
    SleepWithoutLookForClose: loom_sees_a_thread_that_sleeps_through_its_close => "deadlock",
});

// Two pushes for one new room meet a queue with one place: the room that one of them began stays known.
protocol!(a_refused_push_takes_back_nobody_elses_room, || {
    let shared = Arc::new(Shared::new(1).unwrap());
    let table = Arc::new(Table::new());
    let push = |shared: &Shared, table: &Table| {
        let entry = table.join(7, |_| Ok::<(), ()>(())).unwrap();
        let taken = shared.submit(open(7, &entry), || 0).is_ok();
        if !taken {
            table.refused(7, &entry);
        }
        taken
    };
    let other = {
        let (shared, table) = (Arc::clone(&shared), Arc::clone(&table));
        spawn(move || push(&shared, &table))
    };
    let mine = push(&shared, &table);
    let taken = usize::from(mine) + usize::from(other.join().unwrap());
    assert_eq!(taken, 1, "there is one place");
    assert!(table.get(7).is_some(), "the room is under way, and nobody can name it");
    assert_eq!(table.len(), 1);
}, {
    EntryTakenBack: loom_sees_a_room_that_nobody_can_name => "nobody can name it",
});

// If all pushes for a room are refused, nothing of it is left, and who waits for it is told.
protocol!(a_room_whose_orders_were_all_refused_leaves_nothing, || {
    let shared = Arc::new(Shared::new(1).unwrap());
    shared.submit(cancel(room(1)), || 0).unwrap();
    let table = Arc::new(Table::new());
    let callers: Vec<JoinHandle<()>> = (0..2)
        .map(|_| {
            let (shared, table) = (Arc::clone(&shared), Arc::clone(&table));
            spawn(move || {
                let entry = table.join(7, |_| Ok::<(), ()>(())).unwrap();
                assert!(shared.submit(open(7, &entry), || 0).is_err());
                table.refused(7, &entry);
            })
        })
        .collect();
    if let Some(entry) = table.get(7) {
        assert!(entry.wait(None).is_none());
        assert!(entry.is_withdrawn());
    }
    for caller in callers {
        caller.join().unwrap();
    }
    assert_eq!(table.len(), 0);
}, {
    PublishWithoutLock: loom_sees_a_wait_for_a_refused_room => "deadlock",
});
