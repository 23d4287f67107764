//! Servers that break the rules: errors only, no hang, no bytes that the server did not send.

use std::io::{IoSlice, IoSliceMut, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ubtrfs_nbd::{Client, Dialed, NbdError, Settings};

use crate::fake_server::{
    Arrived, CONTEXT, Greeting, QUICK, chunk, data_chunk, hello, hole_chunk, later, option_reply, read_request, simple,
    status_chunk, with_server,
};

/// Opens an export of a server that sends these bytes and ends. Returns the server's end, which takes what the client sends.
fn opened(bytes: &[u8]) -> Result<(Client, UnixStream), NbdError> {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let _ = theirs.write_all(bytes);
    theirs.shutdown(std::net::Shutdown::Write).unwrap();
    let settings = Settings { revive: Duration::ZERO, reply: Duration::from_secs(1), ..QUICK };
    Client::open(Dialed::of_socket(ours), settings).map(|client| (client, theirs))
}

#[test]
fn greetings_that_cannot_be_used_are_named() {
    let no_context = || option_reply(10, 1 << 31 | 1, &[]);
    let go = |replies: &[Vec<u8>]| [hello(), option_reply(8, 1, &[]), no_context(), replies.concat()].concat();
    let refusal = |kind: u32, text: &[u8]| go(&[option_reply(7, 1 << 31 | kind, text)]);
    let export = |size: u64| [&0u16.to_be_bytes()[..], &size.to_be_bytes(), &5u16.to_be_bytes()].concat();
    let blocks = |min: u32, preferred: u32, max: u32| {
        [&3u16.to_be_bytes()[..], &min.to_be_bytes(), &preferred.to_be_bytes(), &max.to_be_bytes()].concat()
    };
    let with_blocks = |blocks: Vec<u8>| {
        go(&[option_reply(7, 3, &export(1 << 20)), option_reply(7, 3, &blocks), option_reply(7, 1, &[])])
    };
    let mut listing = refusal(6, b"");
    for name in ["one", "t\u{1b}wo"] {
        let len = u32::try_from(name.len()).unwrap();
        listing.extend(option_reply(3, 2, &[&len.to_be_bytes()[..], name.as_bytes()].concat()));
    }
    listing.extend(option_reply(3, 1, &[]));
    for (bytes, wanted) in [
        (Vec::new(), "closed the connection during the handshake"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), "is no NBD server"),
        ([b"NBDMAGIC".as_slice(), &0x0000_4202_8186_1253u64.to_be_bytes(), &[0; 200]].concat(), "an old form of NBD"),
        ([&hello()[..16], &[0, 0]].concat(), "an old form of NBD"),
        ([hello(), option_reply(8, 1 << 31 | 5, &[])].concat(), "requires TLS"),
        (refusal(1, b""), "an old form of NBD"),
        (refusal(2, b"not for you\n"), "refuses the export 'export': not for you\\n"),
        (refusal(2, b""), "its policy forbids it"),
        (refusal(5, b""), "requires TLS"),
        (refusal(6, b""), "has no export 'export'; name"),
        (listing, "has no export 'export', but 'one', 't\\u{1b}wo'; name"),
        (refusal(7, b""), "it shuts down"),
        ([hello(), option_reply(8, 1, &[]), option_reply(10, 4, &[0; 19]).repeat(300)].concat(), "too many replies"),
        (go(&[option_reply(7, 1, &[])]), "without telling its size"),
        (go(&[option_reply(7, 3, &export(u64::MAX)), option_reply(7, 1, &[])]), "an impossible size"),
        (go(&[option_reply(9, 1, &[])]), "another option"),
        (go(&vec![option_reply(7, 3, &[9, 9]); 300]), "too many replies"),
        ([go(&[]), option_reply(7, 3, &[0; 70_000])].concat(), "too many bytes"),
        (with_blocks(blocks(3, 4096, 1 << 20)), "contradict each other"),
        (with_blocks(blocks(65536, 65536, 1 << 20)), "blocks of 65536 bytes"),
        (with_blocks(blocks(1, 512, 512)), "btrfs needs 4096 or less"),
    ] {
        let error = opened(&bytes).map(drop).unwrap_err().to_string();
        assert!(error.contains(wanted), "{wanted}: {error}");
        assert!(!error.contains(['\n', '\u{1b}']), "{error}");
    }
}

/// Makes a reply to a request.
type WrongReply = Box<dyn Fn(&Arrived) -> Vec<u8> + Send>;

/// Gives one read of 8192 bytes at 4096 a reply, and returns the client's error.
fn read_error(reply: impl Fn(&Arrived) -> Vec<u8> + Send + 'static) -> String {
    let (client, server) = with_server(Greeting::default(), move |socket| {
        let request = read_request(socket)?;
        socket.write_all(&reply(&request))
    });
    let error = client.read(4096, &mut [IoSliceMut::new(&mut [1; 8192])]).unwrap_err();
    assert!(client.flush().is_err() && client.write(0, &[IoSlice::new(&[1])]).is_err());
    server.join().unwrap();
    error.to_string()
}

#[test]
fn wrong_replies_to_reads_end_the_connection() {
    let data = [7u8; 8192];
    let wrong: Vec<(&str, WrongReply)> = vec![
        ("no reply but 0x78787878", Box::new(|_| vec![b'x'; 100])),
        ("was not sent", Box::new(|request| simple(request.cookie + 1, 5, &[]))),
        ("a simple reply", Box::new(move |request| simple(request.cookie, 0, &data))),
        ("lacks bytes", Box::new(|request| chunk(request.cookie, true, 0, &[]))),
        ("lacks bytes", Box::new(move |request| data_chunk(request.cookie, true, 4096, &data[1..]))),
        ("not asked for", Box::new(move |request| data_chunk(request.cookie, true, 4095, &data))),
        ("not asked for", Box::new(move |request| data_chunk(request.cookie, true, 4097, &data))),
        ("not asked for", Box::new(move |request| data_chunk(request.cookie, true, u64::MAX, &data))),
        (
            "or twice",
            Box::new(move |request| {
                let first = data_chunk(request.cookie, false, 4096, &data);
                [first, hole_chunk(request.cookie, true, 8192, 1)].concat()
            }),
        ),
        ("too short", Box::new(|request| data_chunk(request.cookie, true, 4096, &[]))),
        ("not asked for", Box::new(|request| hole_chunk(request.cookie, true, 4096, 0))),
        ("not asked for", Box::new(|request| hole_chunk(request.cookie, true, 4096, u32::MAX))),
        ("wrong chunk of type 6", Box::new(|request| chunk(request.cookie, true, 6, &[0; 12]))),
        ("in a wrong way", Box::new(|request| status_chunk(request.cookie, 0, &[(8192, true)]))),
        ("of a wrong length", Box::new(|request| chunk(request.cookie, true, 1 << 15, &[0; 5]))),
        ("the error 0", Box::new(|request| chunk(request.cookie, true, 1 << 15, &[0; 6]))),
        (
            "closed the connection",
            Box::new(move |request| data_chunk(request.cookie, true, 4096, &data)[..5000].to_vec()),
        ),
    ];
    for (wanted, reply) in wrong {
        let error = read_error(reply);
        assert!(error.contains(wanted), "{wanted}: {error}");
    }
}

#[test]
fn data_for_a_write_ends_the_connection() {
    let (client, server) = with_server(Greeting::default(), |socket| {
        let request = read_request(socket)?;
        socket.write_all(&data_chunk(request.cookie, true, 0, &[7; 4096]))
    });
    let error = client.write(0, &[IoSlice::new(&[1; 4096])]).unwrap_err().to_string();
    assert!(error.contains("is no read"), "{error}");
    server.join().unwrap();
}

#[test]
fn a_wrong_status_of_ranges_ends_the_connection() {
    let wrong: Vec<(&str, WrongReply)> = vec![
        ("in a wrong way", Box::new(|request| status_chunk(request.cookie, CONTEXT + 1, &[(4096, true)]))),
        ("in a wrong way", Box::new(|request| status_chunk(request.cookie, CONTEXT, &[]))),
        ("in a wrong way", Box::new(|request| status_chunk(request.cookie, CONTEXT, &[(4096, true), (0, true)]))),
        ("in a wrong way", Box::new(|request| status_chunk(request.cookie, CONTEXT, &[(4096, true); 10_000]))),
        (
            "in a wrong way",
            Box::new(|request| chunk(request.cookie, true, 5, &[&CONTEXT.to_be_bytes()[..], &[1; 9]].concat())),
        ),
        ("lacks the status", Box::new(|request| chunk(request.cookie, true, 0, &[]))),
        ("lacks the status", Box::new(|request| simple(request.cookie, 0, &[]))),
        ("is no read", Box::new(|request| data_chunk(request.cookie, true, 0, &[7; 4096]))),
        ("was not sent", Box::new(|request| status_chunk(request.cookie + 1, CONTEXT, &[(4096, true)]))),
    ];
    for (wanted, reply) in wrong {
        let (client, server) = with_server(Greeting { tells_zeros: true, ..Greeting::default() }, move |socket| {
            let request = read_request(socket)?;
            socket.write_all(&reply(&request))
        });
        let error = client.next_data(0, later()).unwrap_err().to_string();
        assert!(error.contains(wanted), "{wanted}: {error}");
        server.join().unwrap();
    }
}

/// A good conversation with random changes. The errors do not matter, but the time does.
#[test]
fn changed_conversations_cause_errors_only() {
    let export = [&0u16.to_be_bytes()[..], &(1u64 << 20).to_be_bytes(), &0x25u16.to_be_bytes()].concat();
    let good = [
        hello(),
        option_reply(8, 1, &[]),
        option_reply(10, 4, &[&CONTEXT.to_be_bytes()[..], b"base:allocation"].concat()),
        option_reply(10, 1, &[]),
        option_reply(7, 3, &export),
        option_reply(7, 1, &[]),
        data_chunk(1, false, 0, &[7; 4096]),
        hole_chunk(1, true, 4096, 4096),
        simple(2, 0, &[]),
        simple(3, 0, &[]),
        data_chunk(4, true, 0, &[7; 8192]),
        status_chunk(5, CONTEXT, &[(4096, true), (4096, false)]),
    ]
    .concat();
    let mut state = 0x1234_5678_9abc_def1u64;
    let mut next = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let begun = Instant::now();
    let mut nr_read = 0;
    for round in 0..1500 {
        let mut bytes = good.clone();
        for _ in 0..round % 4 {
            let at = if next(2) == 0 { next(bytes.len()) } else { next(250) };
            match next(4) {
                0 => bytes[at] = next(256) as u8,
                1 => bytes[at] ^= 1 << next(8),
                2 => bytes.truncate(at.max(1)),
                _ => bytes.insert(at, next(256) as u8),
            }
            if bytes.len() < 300 {
                break;
            }
        }
        let Ok((client, _theirs)) = opened(&bytes) else { continue };
        let mut buf = vec![1; 8192];
        if client.read(0, &mut [IoSliceMut::new(&mut buf)]).is_ok() {
            nr_read += 1;
        }
        let _ = client.write(0, &[IoSlice::new(&[1; 4096])]);
        let _ = client.flush();
        let _ = client.read(0, &mut [IoSliceMut::new(&mut buf)]);
        assert!(client.next_data(0, later()).unwrap_or(0) <= 1 << 20 || bytes[..200] != good[..200]);
    }
    assert!(nr_read > 100, "{nr_read}");
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}
