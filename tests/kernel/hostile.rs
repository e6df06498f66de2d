//! Clients and servers that are slow, rude, or move their bytes in ways that are rarely used.

use std::{
    fs::File,
    io::{PipeWriter, Read, Write},
    mem::zeroed,
    net::{TcpListener, TcpStream},
    os::{
        fd::{AsRawFd, FromRawFd, IntoRawFd},
        unix::net::UnixStream,
    },
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use io_uring::{IoUring, opcode, types};
use tracer::event::HttpFinish;

use crate::{
    Test,
    http::{HEAD, Seen, chunk, close_with_reset, read_all, read_request, request, talk},
};

pub(crate) const TESTS: &[(&str, Test)] = &[
    ("hostile::slow_client", slow_client),
    ("hostile::reset_before_it_is_read", reset_before_it_is_read),
    ("hostile::names", names),
    ("hostile::descriptors_used_again", descriptors_used_again),
    ("hostile::written_by_a_child", written_by_a_child),
    ("hostile::messages_in_parts", messages_in_parts),
    ("hostile::several_messages_in_a_call", several_messages_in_a_call),
    ("hostile::splice", splice),
    ("hostile::between_processes", between_processes),
    ("hostile::io_uring", ring),
];

const END: &str = "0\r\n\r\n";

/// The kernel takes a part of a write, and then none, until the client reads again.
fn slow_client() -> Result<()> {
    const TOKENS: usize = 4_000;
    let seen = talk(
        |mut stream| {
            read_request(&mut stream)?;
            stream.write_all(HEAD.as_bytes())?;
            stream.set_nonblocking(true)?;
            let body = chunk("a").repeat(TOKENS) + END;
            let (mut rest, mut refused) = (body.as_bytes(), 0);
            set_small(&stream, libc::SO_SNDBUF)?;
            while !rest.is_empty() {
                match stream.write(&rest[..rest.len().min(4_000)]) {
                    Ok(count) => rest = &rest[count..],
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                        refused += 1;
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            ensure!(refused > 0, "the client was not slow enough");
            Ok(())
        },
        |mut stream| {
            set_small(&stream, libc::SO_RCVBUF)?;
            stream.write_all(request("slow").as_bytes())?;
            std::thread::sleep(Duration::from_millis(300));
            read_all(stream)
        },
    )?;
    let (begin, end) = seen.only()?;
    ensure!(begin.request_id == "slow" && end.refused_writes > 0, "{end:?}");
    ensure!((end.tokens as usize, end.finish) == (TOKENS, HttpFinish::Done), "{end:?}");
    Ok(())
}

fn set_small(stream: &TcpStream, buffer: libc::c_int) -> Result<()> {
    let small: libc::c_int = 4_096;
    let (to, length) = ((&raw const small).cast(), size_of_val(&small) as u32);
    // SAFETY: the option is valid and as long as said.
    ensure!(unsafe { libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, buffer, to, length) } == 0);
    Ok(())
}

/// A client that asks and leaves by RST at once: what it sent can still be read, and nothing tells of the end but the answer.
fn reset_before_it_is_read() -> Result<()> {
    let seen = talk(
        |mut stream| {
            std::thread::sleep(Duration::from_millis(50));
            read_request(&mut stream)?;
            ensure!(stream.write_all(HEAD.as_bytes()).is_err(), "the connection was not reset");
            Ok(())
        },
        |mut stream| {
            stream.write_all(request("gone").as_bytes())?;
            close_with_reset(stream)
        },
    )?;
    let (begin, end) = seen.only()?;
    ensure!(begin.request_id == "gone" && (end.tokens, end.finish) == (0, HttpFinish::Cut), "{end:?}");
    Ok(())
}

/// Names that would do harm where they are printed, stored or used as a path are cleaned, or their request is refused and
/// counted; the connection goes on.
fn names() -> Result<()> {
    let hostile: [Vec<u8>; 6] = [
        b"\xff\xfe\xc3\x28 not UTF-8".to_vec(),
        b"\x1b[31mred\x1b]0;title\x07".to_vec(),
        b"control \x01\x02\x7f".to_vec(),
        b"../../../etc/shadow".to_vec(),
        "\u{202e}\u{feff}turned".into(),
        vec![b'n'; 100_000],
    ];
    let answer = || format!("{HEAD}{}{END}", chunk("a"));
    let asked = hostile.len();
    let seen = talk(
        move |mut stream| {
            for _ in 0..2 * asked {
                read_request(&mut stream)?;
                stream.write_all(answer().as_bytes())?;
            }
            Ok(())
        },
        move |mut stream| {
            let mut buffer = vec![0; answer().len()];
            for (number, name) in hostile.iter().enumerate() {
                let [before, after] =
                    ["POST / HTTP/1.1\r\nX-Request-ID: ", "\r\nContent-Length: 2\r\n\r\n{}"];
                let good = request(&format!("good-{number}"));
                for text in [[before.as_bytes(), name, after.as_bytes()].concat(), good.into_bytes()] {
                    stream.write_all(&text)?;
                    stream.read_exact(&mut buffer)?;
                }
            }
            Ok(())
        },
    )?;
    let names: Vec<&str> = seen.begins.iter().map(|begin| begin.request_id.as_str()).collect();
    let good = (0..asked).map(|number| format!("good-{number}"));
    for name in good {
        ensure!(names.iter().filter(|one| **one == name).count() == 1, "{name} is not there once: {names:?}");
    }
    let bad = |c: char| c.is_control() || matches!(c, '\u{202e}' | '\u{feff}');
    ensure!(names.iter().all(|name| name.len() <= 256 && !name.contains(bad)), "{names:?}");
    let refused = seen.count("http_lost") + seen.count("http_heads_cut");
    let told = names.len() as u64 - asked as u64;
    println!("  {told} hostile names told of, cleaned; {refused} heads refused or cut");
    ensure!(told + seen.count("http_lost") >= asked as u64 && refused > 0, "{names:?} {:?}", seen.ledger);
    Ok(())
}

/// Hundreds of connections, all with the same few descriptors.
fn descriptors_used_again() -> Result<()> {
    const CONNECTIONS: usize = 200;
    let seen = talk(
        |_| {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            for number in 0..CONNECTIONS {
                let mut client = TcpStream::connect(listener.local_addr()?)?;
                let (mut server, _) = listener.accept()?;
                client.write_all(request(&format!("c{number}")).as_bytes())?;
                read_request(&mut server)?;
                server.write_all(format!("{HEAD}{}{END}", chunk("a").repeat(number % 7 + 1)).as_bytes())?;
                drop(server);
                read_all(client)?;
            }
            Ok(())
        },
        |_| Ok(()),
    )?;
    ensure!(seen.begins.len() == CONNECTIONS && seen.ends.len() == CONNECTIONS, "{}", seen.ends.len());
    for (number, (begin, end)) in seen.begins.iter().zip(&seen.ends).enumerate() {
        let right = begin.request_id == format!("c{number}") && begin.exchange == end.exchange;
        ensure!(right && end.tokens as usize == number % 7 + 1, "{begin:?} {end:?}");
    }
    Ok(())
}

/// A process that accepts, and its child that inherits the connection and answers.
fn written_by_a_child() -> Result<()> {
    let seen = talk(
        |mut stream| {
            read_request(&mut stream)?;
            let answer = format!("{HEAD}{}{}{END}", chunk("a"), chunk("b"));
            // SAFETY: the child makes system calls only.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: as above; the bytes are readable.
                unsafe {
                    let sent = libc::write(stream.as_raw_fd(), answer.as_ptr().cast(), answer.len());
                    libc::_exit(i32::from(sent != answer.len() as isize));
                }
            }
            let mut status = 0;
            // SAFETY: the status is writable.
            ensure!(child > 0 && unsafe { libc::waitpid(child, &raw mut status, 0) } == child);
            ensure!(status == 0, "the child could not write");
            Ok(())
        },
        |mut stream| {
            stream.write_all(request("child").as_bytes())?;
            read_all(stream)
        },
    )?;
    let (begin, end) = seen.only()?;
    ensure!(begin.request_id == "child" && (end.tokens, end.finish) == (2, HttpFinish::Done), "{end:?}");
    ensure!(end.origin.process.tgid != begin.origin.process.tgid, "{end:?}");
    Ok(())
}

fn parts(texts: &mut [Vec<u8>]) -> Vec<libc::iovec> {
    let part = |text: &mut Vec<u8>| libc::iovec { iov_base: text.as_mut_ptr().cast(), iov_len: text.len() };
    texts.iter_mut().map(part).collect()
}

fn message(parts: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all zeroes is a message without parts.
    let mut message: libc::msghdr = unsafe { zeroed() };
    (message.msg_iov, message.msg_iovlen) = (parts.as_mut_ptr(), parts.len());
    message
}

/// sendmsg and recvmsg, with heads and events split over parts.
fn messages_in_parts() -> Result<()> {
    let seen = talk(
        |stream| {
            let mut received = vec![vec![0; 7], vec![0; 30], vec![0; 4096]];
            let mut into = parts(&mut received);
            let mut into = message(&mut into);
            // SAFETY: the parts are writable and as long as said.
            let count = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut into, 0) };
            ensure!(count > 37, "recvmsg: {count}");
            let text = format!("{HEAD}{}{}{END}", chunk("Hello"), chunk("world"));
            let mut pieces: Vec<Vec<u8>> = text.as_bytes().chunks(40).map(<[u8]>::to_vec).collect();
            let mut from = parts(&mut pieces);
            let from = message(&mut from);
            // SAFETY: the parts are readable and as long as said.
            let sent = unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const from, 0) };
            ensure!(sent == text.len() as isize, "sendmsg: {sent}");
            Ok(())
        },
        |mut stream| {
            stream.write_all(request("parts").as_bytes())?;
            read_all(stream)
        },
    )?;
    let (begin, end) = seen.only()?;
    ensure!(begin.request_id == "parts" && (end.tokens, end.finish) == (2, HttpFinish::Done), "{end:?}");
    Ok(())
}

/// What is not followed is counted, and the connection's next request is right again.
fn recovers(seen: &Seen, after: &str) -> Result<()> {
    let last = seen.begins.last().context("no request")?;
    let end = seen.ends.iter().find(|end| end.exchange == last.exchange).context("it did not end")?;
    ensure!(last.request_id == after && (end.tokens, end.finish) == (1, HttpFinish::Done), "{end:?}");
    ensure!(seen.count("socket_unseen") > 0, "{:?}", seen.ledger);
    Ok(())
}

/// sendmmsg sends several messages: which of them a socket sees is not known.
fn several_messages_in_a_call() -> Result<()> {
    let whole = || format!("{HEAD}{}{END}", chunk("a"));
    let seen = talk(
        move |mut stream| {
            read_request(&mut stream)?;
            let mut pieces: Vec<Vec<u8>> = whole().as_bytes().chunks(60).map(<[u8]>::to_vec).collect();
            let mut parts = parts(&mut pieces);
            let mut messages: Vec<libc::mmsghdr> = parts
                .iter_mut()
                .map(|part| libc::mmsghdr { msg_hdr: message(std::slice::from_mut(part)), msg_len: 0 })
                .collect();
            let count = messages.len() as u32;
            // SAFETY: the messages and their parts are valid.
            let sent = unsafe { libc::sendmmsg(stream.as_raw_fd(), messages.as_mut_ptr(), count, 0) };
            ensure!(sent == count.cast_signed(), "sendmmsg: {sent}");
            read_request(&mut stream)?;
            stream.write_all(whole().as_bytes())?;
            Ok(())
        },
        move |mut stream| {
            for name in ["many", "after"] {
                stream.write_all(request(name).as_bytes())?;
                stream.read_exact(&mut vec![0; whole().len()])?;
            }
            Ok(())
        },
    )?;
    recovers(&seen, "after")?;
    ensure!(seen.begins[0].request_id == "many" && seen.count("http_lost") == 1, "{:?}", seen.ledger);
    Ok(())
}

/// A body that goes from a pipe to the socket: its length is known, its bytes are not.
fn splice() -> Result<()> {
    const BYTES: usize = 10_000;
    let head = || format!("HTTP/1.1 200 OK\r\nContent-Length: {BYTES}\r\n\r\n");
    let whole = || format!("{HEAD}{}{END}", chunk("a"));
    let seen = talk(
        move |mut stream| {
            read_request(&mut stream)?;
            stream.write_all(head().as_bytes())?;
            let (reader, mut writer): (_, PipeWriter) = std::io::pipe()?;
            writer.write_all(&[b'x'; BYTES])?;
            let none = std::ptr::null_mut();
            let (from, to) = (reader.as_raw_fd(), stream.as_raw_fd());
            // SAFETY: both descriptors are open, and there are no offsets.
            let moved = unsafe { libc::splice(from, none, to, none, BYTES, 0) };
            ensure!(moved == BYTES as isize, "splice: {moved}");
            read_request(&mut stream)?;
            stream.write_all(whole().as_bytes())?;
            Ok(())
        },
        move |mut stream| {
            stream.write_all(request("spliced").as_bytes())?;
            stream.read_exact(&mut vec![0; head().len() + BYTES])?;
            stream.write_all(request("after").as_bytes())?;
            read_all(stream)
        },
    )?;
    recovers(&seen, "after")?;
    ensure!(seen.ends[0].finish == HttpFinish::Done && seen.count("http_lost") == 0, "{:?}", seen.ends);
    Ok(())
}

/// HTTP over a socket between processes of one machine, as a server in front talks to the one behind it.
fn between_processes() -> Result<()> {
    let seen = talk(
        |_| {
            for name in ["first", "second"] {
                let (mut client, server) = UnixStream::pair()?;
                client.write_all(request(name).as_bytes())?;
                // SAFETY: the descriptor is open and its own.
                let mut server = unsafe { File::from_raw_fd(server.into_raw_fd()) };
                let mut buffer = [0; 512];
                ensure!(server.read(&mut buffer)? > 0);
                // Until the connection ends, which is not seen; the program says when it is done.
                let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n";
                let event = "data: {\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\n";
                server.write_all([head, event, event, "data: [DONE]\n\n"].concat().as_bytes())?;
                drop(server);
                client.read_to_end(&mut Vec::new())?;
            }
            Ok(())
        },
        |_| Ok(()),
    )?;
    let names: Vec<&str> = seen.begins.iter().map(|begin| begin.request_id.as_str()).collect();
    let ends: Vec<_> = seen.ends.iter().map(|end| (end.tokens, end.finish)).collect();
    ensure!(names == ["first", "second"] && ends == [(2, HttpFinish::Done); 2], "{names:?} {ends:?}");
    Ok(())
}

/// Bytes that an io_uring moves are counted; what system calls move beside it is followed.
fn ring() -> Result<()> {
    let whole = || format!("{HEAD}{}{END}", chunk("a"));
    let seen = talk(
        move |mut stream| {
            let mut ring = IoUring::new(8).context("io_uring_setup")?;
            let mut run = |entry| -> Result<i32> {
                // SAFETY: what the entry points to lives until its completion, which is waited for.
                unsafe { ring.submission().push(&entry)? };
                ring.submit_and_wait(1)?;
                Ok(ring.completion().next().context("no completion")?.result())
            };
            let fd = types::Fd(stream.as_raw_fd());
            // A request that the ring reads is not seen, and neither is its answer.
            let mut buffer = [0u8; 512];
            ensure!(run(opcode::Recv::new(fd, buffer.as_mut_ptr(), 512).build())? > 0);
            let text = whole();
            let send = || opcode::Send::new(fd, text.as_ptr(), text.len() as u32).build();
            ensure!(run(send())? == text.len() as i32);
            // Of one that a system call reads, the request is.
            read_request(&mut stream)?;
            ensure!(run(send())? == text.len() as i32);
            // And with system calls alone all is.
            read_request(&mut stream)?;
            stream.write_all(text.as_bytes())?;
            Ok(())
        },
        move |mut stream| {
            for name in ["ring", "half", "calls"] {
                stream.write_all(request(name).as_bytes())?;
                stream.read_exact(&mut vec![0; whole().len()])?;
            }
            Ok(())
        },
    )?;
    let names: Vec<&str> = seen.begins.iter().map(|begin| begin.request_id.as_str()).collect();
    let ends: Vec<_> = seen.ends.iter().map(|end| (end.tokens, end.finish)).collect();
    let counted = ["io_urings_made", "socket_io_uring", "socket_unseen"].map(|name| seen.count(name));
    println!("  seen: {names:?} {ends:?}; rings, moves, others: {counted:?}");
    ensure!(names == ["half", "calls"], "{names:?}");
    ensure!(ends == [(0, HttpFinish::Lost), (1, HttpFinish::Done)], "{ends:?}");
    // A read, and the answer to a request that was seen.
    ensure!(counted == [1, 2, 0], "{counted:?}");
    Ok(())
}
