//! Steps in words, for traces.

use super::steps::{ConnName, Flight, Step};
use super::world::{D, Item, World, address, room};
use kvxfer_proto::Incarnation;
use kvxfer_proto::node::Wait;
use std::fmt;

impl World {
    /// A step in words.
    #[must_use]
    pub fn describe(&self, step: &Step) -> String {
        Words(self, step).to_string()
    }
}

struct Words<'a>(&'a World, &'a Step);

impl Words<'_> {
    fn peer(&self, who: Incarnation) -> String {
        let at = address(who);
        let dead = if self.0.alive(who).is_some() { "" } else { " (dead)" };
        format!("{}{dead}", ["S0", "S1", "D"][at.min(D)])
    }

    fn wait(&self, w: Wait) -> String {
        match w {
            Wait::Inbound(r) => format!("expected room {r}"),
            Wait::Outbound(r) => format!("pushed room {r}"),
            Wait::Peer(key) => format!("peer {}", self.peer(key.incarnation)),
        }
    }

    fn session(&self, name: &ConnName) -> u64 {
        self.0.find(name).map_or(0, |i| self.0.conns[i].session.0)
    }

    fn read(&self, at: usize, name: &ConnName) -> String {
        let end = usize::from(at != D);
        let item = self.0.find(name).and_then(|i| self.0.conns[i].ends[end].inbox.front());
        match item {
            Some(Item::Describe { generation, received }) => {
                format!("Describe (generation {generation}, received {received})")
            }
            Some(Item::Attach(n)) => format!("Attach (endpoint {n})"),
            Some(Item::Attached) => "Attached".to_owned(),
            Some(Item::Frame(f)) => format!("{} no. {}: {:?}", f.msg.name(), f.number, Brief(&f.msg)),
            None => "nothing".to_owned(),
        }
    }
}

struct Brief<'a>(&'a kvxfer_proto::msg::Msg);

impl fmt::Debug for Brief<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use kvxfer_proto::msg::Msg;
        match self.0 {
            Msg::Grant(m) => write!(f, "room {} seq {}", m.room, m.seq.0),
            Msg::Cancel(m) => write!(f, "room {} up to seq {} ({})", m.room, m.upto.0, m.reason),
            Msg::Drained(m) => write!(f, "room {} seq {} ({})", m.room, m.seq.0, m.reason),
            Msg::Ready(m) => write!(f, "room {} seq {} push {}", m.room, m.seq.0, m.push.0),
            Msg::Copied(m) => write!(f, "room {} seq {} push {}", m.room, m.seq.0, m.push.0),
            Msg::Done(m) => write!(f, "room {} seq {} push {} last {}", m.room, m.seq.0, m.push.0, m.last),
            Msg::Finished(m) => write!(f, "room {} seq {}", m.room, m.seq.0),
            Msg::RoomFailed(m) => write!(f, "room {}", m.room),
            Msg::Pack(m) => write!(f, "room {} seq {} push {}", m.room, m.seq.0, m.push.0),
            Msg::Credit(m) => write!(f, "room {} seq {} slots {:?}", m.room, m.seq.0, m.slots),
            Msg::Packed(m) => {
                write!(f, "room {} seq {} push {} slot {}", m.room, m.seq.0, m.push.0, m.slot)
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Words<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let w = self.0;
        let name = |at: &usize| w.name(*at);
        match self.1 {
            Step::Push(at, r) => write!(f, "{}: the engine pushes room {}", name(at), room(*r)),
            Step::Resolve => write!(f, "{}: the directory answers", w.name(D)),
            Step::Dial(key) => write!(f, "{}: dials {}", w.name(D), self.peer(key.incarnation)),
            Step::Read(at, c) => {
                let other = self.peer(c.0[usize::from(*at == D)]);
                write!(
                    f,
                    "{}: reads from {other}, session {}: {}",
                    name(at),
                    self.session(c),
                    self.read(*at, c)
                )
            }
            Step::EndOfFile(at, c) => {
                let other = self.peer(c.0[usize::from(*at == D)]);
                write!(f, "{}: sees the end of session {} with {other}", name(at), self.session(c))
            }
            Step::Post(at, id) => write!(f, "{}: posts the next piece of delivery {}", name(at), id.0),
            Step::Land(Flight(x)) => {
                let loose = if x.loose { " (its endpoint is closed)" } else { "" };
                let place = x.slot.map_or(String::new(), |n| format!(" in slot {n}"));
                write!(
                    f,
                    "piece {} of room {} from {} lands{place}{loose}",
                    x.piece,
                    room(x.room),
                    self.peer(x.from)
                )
            }
            Step::Copy(id) if w.procs[D].running.get(id).is_some_and(|r| r.packed) => {
                write!(f, "{}: takes the next piece of delivery {} out of its slot", w.name(D), id.0)
            }
            Step::Copy(id) => write!(f, "{}: copies the next piece of delivery {}", w.name(D), id.0),
            Step::Complete(at, id) if w.procs[*at].running.get(id).is_some_and(|r| r.packed) => {
                write!(f, "{}: a packed piece of delivery {} is flushed", name(at), id.0)
            }
            Step::Complete(at, id) => write!(f, "{}: delivery {} has ended", name(at), id.0),
            Step::FenceDone(at, key) => {
                write!(f, "{}: the endpoint to {} is closed", name(at), self.peer(key.incarnation))
            }
            Step::Broken(at, key) => {
                write!(f, "{}: finds its endpoint to {} broken", name(at), self.peer(key.incarnation))
            }
            Step::DeathSeen(at, who) => write!(f, "{}: sees the death of {}", name(at), self.peer(*who)),
            Step::Settled(at, who) => {
                write!(f, "{}: nothing of {} is in its sockets any more", name(at), self.peer(*who))
            }
            Step::Doom(at) => write!(f, "{}: does nothing until its connection is lost", name(at)),
            Step::Continue(at) => write!(f, "{}: is continued", name(at)),
            Step::Elapse(at, wait) => write!(f, "{}: time runs out for {}", name(at), self.wait(*wait)),
            Step::Awake(at, wait, _) => {
                write!(f, "{}: time runs out for {}, and who was stopped goes on", name(at), self.wait(*wait))
            }
            Step::Settle(true) => write!(f, "the source that is left out has done its part"),
            Step::Settle(false) => write!(f, "the source that is left out will do nothing more"),
            Step::Cancel(at, r) => write!(f, "FAULT {}: the engine cancels room {}", name(at), room(*r)),
            Step::RunOut(at, wait) => write!(f, "FAULT {}: time runs out for {}", name(at), self.wait(*wait)),
            Step::Restart(at) => write!(f, "FAULT {}: is killed and another starts in its place", name(at)),
            Step::Cut(c) => write!(f, "FAULT session {} of {} is cut", self.session(c), self.peer(c.0[1])),
            Step::Stop(at) => write!(f, "FAULT {}: is stopped", name(at)),
        }
    }
}
