#![allow(clippy::unwrap_used, clippy::expect_used)]

use super::*;
use kvxfer_proto::handshake::Handshake;
use kvxfer_proto::wire::Decoder;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

fn control(limits: Limits) -> (Control, UnixStream) {
    let (wake, other) = UnixStream::pair().unwrap();
    let listen = HostPort { host: "127.0.0.1".to_owned(), port: 0 };
    let guard = Guard { secret: None, tls: None, insecure: false, limits };
    let control = Control::new(&listen, wake.as_fd(), Incarnation(1), guard).unwrap();
    // The descriptor that was watched is gone with `wake`, and nothing wakes anybody here.
    (control, other)
}

/// Turns until it is so, and then until nothing is ready any more.
fn until(control: &mut Control, out: &mut Vec<ControlEvent>, is: impl Fn(&Control, &[ControlEvent]) -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let any = control.turn(Some(Duration::from_millis(20)), out);
        control.settle(out);
        if !any && is(control, out) {
            return;
        }
        assert!(Instant::now() < end, "never: {out:?}");
    }
}

fn established(events: &[ControlEvent]) -> usize {
    events.iter().filter(|e| matches!(e, ControlEvent::Established(..))).count()
}

#[test]
fn a_connection_that_passes_its_handshake_in_a_turn_is_no_stranger_later_in_it() {
    let (mut control, _wake) = control(Limits { handshakes_per_address: 1, ..Limits::default() });
    let mut events = Vec::new();

    let config = handshake::Config::new(Incarnation(2), [2; 32], None);
    let mut peer = Handshake::initiator(config, Purpose::Lookup, SessionNo(1));
    let mut first = TcpStream::connect(control.address()).unwrap();
    let hello = peer.poll_frame().unwrap();
    first.write_all(&hello).unwrap();
    first.set_nonblocking(true).unwrap();
    until(&mut control, &mut events, |_, _| first.peek(&mut [0]).is_ok_and(|n| n > 0));
    let mut decoder = Decoder::new();
    let mut buf = [0; 4096];
    let n = first.read(&mut buf).unwrap();
    decoder.feed(&buf[..n]);
    peer.handle_input(&mut decoder);

    // Ready in this order: its last word, then the next connection, which is one too many if both are strangers.
    let proof = peer.poll_frame().unwrap();
    first.write_all(&proof).unwrap();
    let _second = TcpStream::connect(control.address()).unwrap();
    until(&mut control, &mut events, |control, events| established(events) == 1 && control.len() == 2);
    assert!(!events.iter().any(|e| matches!(e, ControlEvent::Closed { .. })), "{events:?}");
    assert_eq!(control.limited_connections, 0);

    // The limit is there: of two that are still strangers the older one goes.
    let _third = TcpStream::connect(control.address()).unwrap();
    until(&mut control, &mut events, |control, _| control.limited_connections == 1);
    assert_eq!((control.len(), established(&events)), (2, 1));
}

#[test]
fn a_peer_that_has_said_all_it_wanted_is_told_why_it_is_refused() {
    let (mut control, _wake) = control(Limits::default());
    let mut events = Vec::new();
    let config = handshake::Config::new(Incarnation(2), [2; 32], None);
    let mut peer = Handshake::initiator(config, Purpose::Lookup, SessionNo(1));
    let mut stream = TcpStream::connect(control.address()).unwrap();
    until(&mut control, &mut events, |control, _| control.len() == 1);
    let hello = peer.poll_frame().unwrap();
    stream.write_all(&[hello.clone(), hello].concat()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    // Its words in one turn and its end in the next, with nothing sent in between.
    for _ in 0..3 {
        control.turn(Some(Duration::from_secs(1)), &mut events);
    }
    control.settle(&mut events);
    let mut said = Vec::new();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.read_to_end(&mut said).unwrap();
    let mut decoder = Decoder::new();
    decoder.feed(&said);
    let mut names = Vec::new();
    while let Ok(Some(kvxfer_proto::wire::Decoded::Frame(frame))) = decoder.next_frame() {
        names.push(frame.msg.name());
    }
    assert_eq!(names, ["Challenge", "Refuse"]);
}
