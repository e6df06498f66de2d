//! What moves over connections: any bytes, cut anywhere, captured in part.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tracer::{
    event::{
        Event, Origin,
        http::{SocketAction, SocketIo},
    },
    http::Http,
};

fuzz_target!(|moves: Vec<(u8, u8, u16, Vec<u8>)>| {
    let mut http = Http::default();
    let mut events = Vec::new();
    for ((action, cookie, more, bytes), time_ns) in moves.into_iter().zip(1u64..) {
        let moved = bytes.len() as u64 + u64::from(more);
        let action = match action % 5 {
            0 => SocketAction::Recv { bytes: moved, arrived_ns: Some(time_ns) },
            1 => SocketAction::Send { result: moved as i64, sent_until: moved as u32, wire_until: u32::from(more) },
            2 => SocketAction::Send { result: -11, sent_until: 0, wire_until: 0 },
            3 => SocketAction::Wire { wire_until: u32::from(more) },
            _ => SocketAction::Closed,
        };
        let origin = Origin { time_ns, ..Origin::default() };
        let io = SocketIo { origin, cookie: u64::from(cookie % 4), action, bytes, local_port: 80 };
        http.feed(&io, &mut events);
    }
    let count = |is: fn(&Event) -> bool| events.iter().filter(|event| is(event)).count();
    let (begins, ends) =
        (count(|event| matches!(event, Event::HttpBegin(_))), count(|event| matches!(event, Event::HttpEnd(_))));
    assert!(ends <= begins, "{ends} ends of {begins} exchanges");
});
