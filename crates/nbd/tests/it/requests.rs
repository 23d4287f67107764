//! Requests of one thread and of many, answered in any order and in any pieces.

use std::io::{IoSlice, IoSliceMut, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::fake_server::{
    CONTEXT, DURABLE_WRITES, FLAGS, Greeting, MULTI_CONN, MemoryServer, WRITE_ZEROES, chunk, data_chunk, hole_chunk,
    later, read_request, simple, status_chunk, with_server,
};

/// The byte at an offset of the export of these tests.
fn byte_at(offset: u64) -> u8 {
    (offset / 4096 * 31 + offset % 251) as u8
}

fn bytes_at(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(byte_at).collect()
}

#[test]
fn a_read_is_split_and_its_pieces_arrive_in_any_order() {
    for is_structured in [true, false] {
        let greeting = Greeting { is_structured, blocks: Some([512, 4096, 1 << 20]), ..Greeting::default() };
        let (client, server) = with_server(greeting, move |socket| {
            let mut requests = (0..5).map(|_| read_request(socket)).collect::<Result<Vec<_>, _>>()?;
            assert!(requests.iter().all(|request| request.command == 0 && request.len <= 512 << 10));
            requests.reverse();
            for request in requests {
                let data = bytes_at(request.offset, request.len as usize);
                if !is_structured {
                    socket.write_all(&simple(request.cookie, 0, &data))?;
                    continue;
                }
                // The end first; then a hole; then the start.
                let (head, tail) = data.split_at(1000);
                socket.write_all(&data_chunk(request.cookie, false, request.offset + 1000, tail))?;
                socket.write_all(&data_chunk(request.cookie, false, request.offset, head))?;
                socket.write_all(&chunk(request.cookie, true, 0, &[]))?;
            }
            Ok(())
        });
        // Two buffers, which do not end where requests end.
        let (mut one, mut other) = (vec![1; 700_001], vec![1; 2 << 20]);
        other.truncate((2 << 20) - 700_001 + 1536);
        client.read(1536, &mut [IoSliceMut::new(&mut one), IoSliceMut::new(&mut other)]).unwrap();
        one.extend(&other);
        assert!(one == bytes_at(1536, one.len()), "structured: {is_structured}");
        server.join().unwrap();
    }
}

#[test]
fn holes_read_as_zeros() {
    let (client, server) = with_server(Greeting::default(), |socket| {
        let request = read_request(socket)?;
        socket.write_all(&hole_chunk(request.cookie, false, request.offset, 4096))?;
        socket.write_all(&data_chunk(request.cookie, true, request.offset + 4096, &[7; 4096]))
    });
    let mut buf = vec![1; 8192];
    client.read(8192, &mut [IoSliceMut::new(&mut buf)]).unwrap();
    assert!(buf[..4096] == [0; 4096] && buf[4096..] == [7; 4096]);
    server.join().unwrap();
}

#[test]
fn reads_of_single_bytes_ask_for_whole_blocks() {
    let greeting = Greeting { blocks: Some([4096, 4096, 1 << 20]), ..Greeting::default() };
    let (client, server) = with_server(greeting, |socket| {
        let request = read_request(socket)?;
        assert_eq!((request.offset, request.len), (4096, 8192));
        socket.write_all(&data_chunk(request.cookie, true, 4096, &bytes_at(4096, 8192)))
    });
    let mut buf = [0; 10];
    client.read(8190, &mut [IoSliceMut::new(&mut buf)]).unwrap();
    assert_eq!(buf[..], bytes_at(8190, 10));
    let refused = client.write(1, &[IoSlice::new(&[1])]).unwrap_err();
    assert!(refused.to_string().contains("whole blocks"), "{refused}");
    server.join().unwrap();
}

#[test]
fn errors_of_the_server_have_the_numbers_of_linux() {
    let (client, server) = with_server(Greeting::default(), |socket| {
        let write = read_request(socket)?;
        socket.write_all(&simple(write.cookie, 28, &[]))?;
        let read = read_request(socket)?;
        let payload = [&5u32.to_be_bytes()[..], &3u16.to_be_bytes(), b"bad"].concat();
        socket.write_all(&chunk(read.cookie, false, 1 << 15 | 1, &payload))?;
        socket.write_all(&chunk(read.cookie, true, 0, &[]))?;
        let trim = read_request(socket)?;
        socket.write_all(&simple(trim.cookie, 77777, &[]))?;
        let flush = read_request(socket)?;
        socket.write_all(&simple(flush.cookie, 5, &[]))
    });
    assert_eq!(client.write(0, &[IoSlice::new(&[1; 4096])]).unwrap_err().raw_os_error(), Some(28));
    let failed = client.read(0, &mut [IoSliceMut::new(&mut [0; 4096])]).unwrap_err().to_string();
    assert!(failed.contains("Input/output error") && failed.ends_with("the server says: bad"), "{failed}");
    assert_eq!(client.trim(0, 4096).unwrap_err().raw_os_error(), Some(5));
    assert_eq!(client.flush().unwrap_err().raw_os_error(), Some(5));
    // N1: no flush succeeds after a flush that failed.
    assert!(client.flush().unwrap_err().to_string().contains("an earlier flush failed"));
    server.join().unwrap();
}

#[test]
fn many_threads_share_the_connections() {
    for flags in [FLAGS, FLAGS | MULTI_CONN] {
        let server = MemoryServer::start(Greeting { size: 64 << 20, flags, ..Greeting::default() });
        let client = server.client().unwrap();
        assert_eq!(client.nr_connections(), if flags == FLAGS { 1 } else { 4 });
        let nr_done = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let (client, nr_done) = (&client, &nr_done);
                scope.spawn(move || {
                    for round in 0..60u64 {
                        let len = 4096 * (1 + (round * 7 + thread) % 300) as usize;
                        let offset = thread * (8 << 20) + round * 4096;
                        let data = bytes_at(offset ^ round, len);
                        let (one, other) = data.split_at(len / 3);
                        client.write(offset, &[IoSlice::new(one), IoSlice::new(other)]).unwrap();
                        let mut found = vec![0; len];
                        let (one, other) = found.split_at_mut(len / 2);
                        client.read(offset, &mut [IoSliceMut::new(one), IoSliceMut::new(other)]).unwrap();
                        assert!(found == data);
                        if round % 20 == 0 {
                            client.flush().unwrap();
                        }
                        nr_done.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(nr_done.load(Ordering::Relaxed), 480);
    }
}

#[test]
fn long_runs_of_zeros_are_not_sent() {
    for flags in [FLAGS, FLAGS | WRITE_ZEROES] {
        let server = MemoryServer::start(Greeting { size: 8 << 20, flags, ..Greeting::default() });
        server.content.lock().unwrap().fill(9);
        let client = server.client().unwrap();
        // Requests end at multiples of 512 KiB: data, zeros, zeros but for the last byte, few zeros.
        let mut data = vec![0; 3 << 19];
        data[4096] = 1;
        *data.last_mut().unwrap() = 1;
        let (one, other) = data.split_at(700_001);
        client.write(1 << 20, &[IoSlice::new(one), IoSlice::new(other)]).unwrap();
        client.write(0, &[IoSlice::new(&[0; 4096])]).unwrap();
        let content = server.content.lock().unwrap();
        assert!(content[1 << 20..][..data.len()] == data && content[..4096] == [0; 4096] && content[4096] == 9);
        assert!(content[(1 << 20) + data.len()..].iter().all(|byte| *byte == 9));
        let commands: Vec<u16> = server.log.lock().unwrap().iter().map(|(_, command, _)| *command).collect();
        let wanted = if flags == FLAGS { [1, 1, 1, 1] } else { [1, 6, 1, 1] };
        assert_eq!(commands, wanted);
    }
}

#[test]
fn a_durable_write_is_one_request() {
    let server = MemoryServer::start(Greeting { flags: FLAGS | DURABLE_WRITES, ..Greeting::default() });
    let client = server.client().unwrap();
    client.write_durably(4096, &[IoSlice::new(&[7; 4096])]).unwrap().unwrap();
    assert_eq!(*server.log.lock().unwrap(), [(0, 1, 1)]);
    assert_eq!(server.content.lock().unwrap()[4096..8192], [7; 4096]);
    let without = MemoryServer::start(Greeting::default());
    assert!(without.client().unwrap().write_durably(0, &[IoSlice::new(&[7; 4096])]).is_none());
}

#[test]
fn the_next_data_is_found_without_reading() {
    let blocks = Some([4096, 4096, 1 << 20]);
    let server = MemoryServer::start(Greeting { size: 4 << 20, tells_zeros: true, blocks, ..Greeting::default() });
    let client = server.client().unwrap();
    assert_eq!(client.next_data(0, later()).unwrap(), 4 << 20);
    // More ranges than one reply has.
    for block in (0..40).map(|nr| nr * 24_576).chain([1023 * 4096]) {
        server.content.lock().unwrap()[block] = 1;
    }
    for (from, to) in [(0, 0), (1, 1), (4096, 24_576), (24_575, 24_576), (40 * 24_576, 1023 * 4096), (4 << 20, 4 << 20)]
    {
        assert_eq!(client.next_data(from, later()).unwrap(), to, "{from}");
    }
    assert!(server.log.lock().unwrap().iter().all(|(_, command, _)| *command == 7));
    let silent = MemoryServer::start(Greeting::default());
    let client = silent.client().unwrap();
    assert!(!client.tells_zeros());
    assert_eq!(client.next_data(8192, later()).unwrap(), 8192);
}

#[test]
fn a_search_for_data_ends_although_the_server_tells_few_bytes_at_a_time() {
    let (client, server) = with_server(Greeting { tells_zeros: true, ..Greeting::default() }, |socket| {
        loop {
            let request = read_request(socket)?;
            std::thread::sleep(Duration::from_millis(1));
            socket.write_all(&status_chunk(request.cookie, CONTEXT, &[(1, true)]))?;
        }
    });
    let begun = Instant::now();
    let late = client.next_data(0, begun + Duration::from_millis(300)).unwrap_err();
    assert_eq!(late.kind(), std::io::ErrorKind::TimedOut);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    drop(client);
    server.join().unwrap();
}

#[test]
fn nothing_passes_the_end_of_the_export() {
    let (client, server) = with_server(Greeting { size: 8192, ..Greeting::default() }, |_| Ok(()));
    let past = client.read(4096, &mut [IoSliceMut::new(&mut [0; 4097])]).unwrap_err();
    assert_eq!(past.kind(), std::io::ErrorKind::UnexpectedEof);
    let past = client.write(u64::MAX, &[IoSlice::new(&[0; 2])]).unwrap_err();
    assert_eq!(past.kind(), std::io::ErrorKind::WriteZero);
    server.join().unwrap();
}
