//! Lost connections: no write and no flush succeeds after one, and reads get a new connection.

use std::io::{IoSlice, IoSliceMut, Write};
use std::time::{Duration, Instant};

use crate::fake_server::{
    DURABLE_WRITES, FLAGS, Greeting, MULTI_CONN, MemoryServer, read_request, simple, with_server,
};

#[test]
fn a_flush_after_a_lost_connection_never_succeeds() {
    for flags in [FLAGS, FLAGS | MULTI_CONN] {
        let server = MemoryServer::start(Greeting { flags, ..Greeting::default() });
        let client = server.client().unwrap();
        client.write(4096, &[IoSlice::new(&[7; 4096])]).unwrap();
        client.flush().unwrap();
        let nr_before = server.log.lock().unwrap().len();
        server.cut();
        let lost = client.flush().unwrap_err();
        assert!(lost.to_string().contains("is lost"), "{lost}");
        // A read gets a new connection.
        let mut buf = [0; 4096];
        client.read(4096, &mut [IoSliceMut::new(&mut buf)]).unwrap();
        assert_eq!(buf, [7; 4096]);
        // The new connection changes nothing for writes and flushes.
        for _ in 0..8 {
            assert!(client.flush().is_err());
            assert!(client.write(0, &[IoSlice::new(&[1; 4096])]).is_err());
            assert!(client.trim(0, 4096).is_err());
            client.read(0, &mut [IoSliceMut::new(&mut buf)]).unwrap();
        }
        let log = server.log.lock().unwrap();
        assert!(log[nr_before..].iter().all(|(_, command, _)| *command == 0), "{log:?}");
    }
}

#[test]
fn a_read_that_finds_the_loss_ends_writes_too() {
    let server = MemoryServer::start(Greeting::default());
    let client = server.client().unwrap();
    client.write(0, &[IoSlice::new(&[7; 4096])]).unwrap();
    client.flush().unwrap();
    server.cut();
    client.read(0, &mut [IoSliceMut::new(&mut [0; 4096])]).unwrap();
    assert!(client.flush().is_err());
}

#[test]
fn no_read_succeeds_after_the_loss_of_writes_that_were_not_flushed() {
    let server = MemoryServer::start(Greeting::default());
    let client = server.client().unwrap();
    client.write(0, &[IoSlice::new(&[7; 4096])]).unwrap();
    client.flush().unwrap();
    client.write(0, &[IoSlice::new(&[8; 4096])]).unwrap();
    server.cut();
    // The server's machine lost the write.
    server.content.lock().unwrap()[..4096].fill(7);
    for _ in 0..3 {
        let lost = client.read(0, &mut [IoSliceMut::new(&mut [0; 4096])]).unwrap_err();
        assert!(lost.to_string().contains("not flushed"), "{lost}");
    }
}

#[test]
fn after_a_durable_write_reads_survive_the_loss_and_no_flush_does() {
    let server = MemoryServer::start(Greeting { flags: FLAGS | DURABLE_WRITES, ..Greeting::default() });
    let client = server.client().unwrap();
    client.write(0, &[IoSlice::new(&[7; 4096])]).unwrap();
    client.flush().unwrap();
    client.write_durably(4096, &[IoSlice::new(&[8; 4096])]).unwrap().unwrap();
    server.cut();
    let mut buf = [0; 4096];
    client.read(4096, &mut [IoSliceMut::new(&mut buf)]).unwrap();
    assert_eq!(buf, [8; 4096]);
    assert!(client.flush().is_err());
    assert!(client.write_durably(4096, &[IoSlice::new(&[9; 4096])]).unwrap().is_err());
}

#[test]
fn a_durable_write_is_no_flush_of_other_writes() {
    let server = MemoryServer::start(Greeting { flags: FLAGS | DURABLE_WRITES, ..Greeting::default() });
    let client = server.client().unwrap();
    client.write(0, &[IoSlice::new(&[7; 4096])]).unwrap();
    client.write_durably(4096, &[IoSlice::new(&[8; 4096])]).unwrap().unwrap();
    server.cut();
    let lost = client.read(0, &mut [IoSliceMut::new(&mut [0; 4096])]).unwrap_err();
    assert!(lost.to_string().contains("not flushed"), "{lost}");
}

#[test]
fn no_flush_succeeds_after_a_durable_write_that_failed() {
    let (client, server) = with_server(Greeting { flags: FLAGS | DURABLE_WRITES, ..Greeting::default() }, |socket| {
        let write = read_request(socket)?;
        assert_eq!((write.command, write.flags), (1, 1));
        socket.write_all(&simple(write.cookie, 5, &[]))
    });
    assert_eq!(client.write_durably(0, &[IoSlice::new(&[1; 4096])]).unwrap().unwrap_err().raw_os_error(), Some(5));
    assert!(client.flush().unwrap_err().to_string().contains("an earlier durable write failed"));
    server.join().unwrap();
}

#[test]
fn a_server_that_is_gone_is_waited_for_once() {
    let server = MemoryServer::start(Greeting::default());
    let client = server.client().unwrap();
    std::fs::remove_file(server.path()).unwrap();
    server.cut();
    let begun = Instant::now();
    let away = client.read(0, &mut [IoSliceMut::new(&mut [0; 4096])]).unwrap_err();
    assert!(away.to_string().contains("cannot connect"), "{away}");
    assert!(begun.elapsed() >= Duration::from_millis(1900), "{:?}", begun.elapsed());
    let begun = Instant::now();
    for _ in 0..100 {
        assert!(client.read(0, &mut [IoSliceMut::new(&mut [0; 4096])]).is_err());
    }
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}", begun.elapsed());
}

#[test]
fn a_server_that_falls_silent_is_lost() {
    let (client, server) = with_server(Greeting::default(), |socket| {
        let first = read_request(socket)?;
        socket.write_all(&simple(first.cookie, 0, &[]))?;
        // A flush may take longer.
        let flush = read_request(socket)?;
        std::thread::sleep(Duration::from_millis(1500));
        socket.write_all(&simple(flush.cookie, 0, &[]))?;
        read_request(socket)?;
        // The client gives up, which ends the stream.
        read_request(socket).map(drop)
    });
    client.write(0, &[IoSlice::new(&[1; 4096])]).unwrap();
    client.flush().unwrap();
    let begun = Instant::now();
    let silent = client.write(0, &[IoSlice::new(&[1; 4096])]).unwrap_err();
    assert!(silent.to_string().contains("does not answer in time"), "{silent}");
    assert!(begun.elapsed() < Duration::from_secs(5));
    server.join().unwrap();
}

#[test]
fn a_server_that_drips_is_lost() {
    let (client, server) = with_server(Greeting::default(), |socket| {
        let request = read_request(socket)?;
        for byte in simple(request.cookie, 0, &[]) {
            socket.write_all(&[byte])?;
            std::thread::sleep(Duration::from_millis(600));
        }
        Ok(())
    });
    let begun = Instant::now();
    let slow = client.write(0, &[IoSlice::new(&[1; 4096])]).unwrap_err();
    assert!(slow.to_string().contains("too slow"), "{slow}");
    assert!(begun.elapsed() < Duration::from_secs(9));
    server.join().unwrap();
}
