//! The server of this crate, with the crate's client and with clients that break the rules.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use proptest::prelude::*;
use ubtrfs_nbd::{Client, Content, Dialed, serve};

use crate::fake_server::QUICK;

const SIZE: u64 = 16 << 20;

/// Content whose sector 7 cannot be read.
struct Sectors {
    nr_reads: AtomicUsize,
}

impl Content for Sectors {
    fn size_bytes(&self) -> u64 {
        SIZE
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.nr_reads.fetch_add(1, Ordering::Relaxed);
        assert!(offset + buf.len() as u64 <= SIZE);
        if (offset..offset + buf.len() as u64).contains(&(7 * 4096)) {
            return Err(io::Error::other("the object\nhas changed"));
        }
        (offset..).zip(buf).for_each(|(at, byte)| *byte = (at / 4096 * 31 + at % 251) as u8);
        Ok(())
    }
}

fn started() -> (UnixStream, JoinHandle<io::Result<()>>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (ours, std::thread::spawn(move || serve(&theirs, &Sectors { nr_reads: AtomicUsize::new(0) }, 4)))
}

#[test]
fn the_client_reads_what_the_server_serves() {
    let (socket, server) = started();
    let client = Client::open(Dialed::of_socket(socket), QUICK).unwrap();
    assert_eq!(client.export().size_bytes, SIZE);
    assert!(client.export().flags.is_read_only());
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let client = &client;
            scope.spawn(move || {
                let (offset, len) = ((1 << 20) + thread * 4099, 3 << 20);
                let mut buf = vec![0; len];
                client.read(offset, &mut [IoSliceMut::new(&mut buf)]).unwrap();
                assert!((offset..).zip(buf).all(|(at, byte)| byte == (at / 4096 * 31 + at % 251) as u8));
            });
        }
    });
    // An error has a text of one line, and ends nothing.
    let error = client.read(7 * 4096, &mut [IoSliceMut::new(&mut [0; 512])]).unwrap_err();
    assert!(error.to_string().contains("the server says: the object\\nhas changed"), "{error}");
    client.flush().unwrap();
    client.write(0, &[IoSlice::new(&[0; 4096])]).unwrap_err();
    drop(client);
    server.join().unwrap().unwrap_err();
}

#[test]
fn a_server_ends_with_its_client() {
    let (socket, server) = started();
    drop(socket);
    assert!(server.join().unwrap().is_err(), "before the handshake");
    let (socket, server) = started();
    let client = Client::open(Dialed::of_socket(socket), QUICK).unwrap();
    drop(client);
    server.join().unwrap().unwrap();
}

proptest! {
    /// Any bytes of a client end in an error or in answers, and the server ends.
    #[test]
    fn wrong_clients_end_the_server_only(
        greets in any::<bool>(),
        parts in prop::collection::vec((any::<u16>(), any::<u64>(), any::<u32>(), 0u8..4), 0..12),
    ) {
        let (mut socket, server) = started();
        let mut bytes = vec![0, 0, 0, 3];
        if greets {
            for (option, len) in [(8u32, 0u32), (7, 0)] {
                bytes.extend([&b"IHAVEOPT"[..], &option.to_be_bytes(), &len.to_be_bytes()].concat());
            }
        }
        for (command, offset, len, kind) in parts {
            match kind {
                0 => bytes.extend([&b"IHAVEOPT"[..], &u32::from(command % 12).to_be_bytes(), &(len % 64).to_be_bytes()].concat()),
                1 => bytes.extend(offset.to_be_bytes()),
                _ => {
                    let head = [0x25, 0x60, 0x95, 0x13, 0, 0];
                    let (offset, len) = if kind == 2 { (offset % SIZE, len % 8192) } else { (offset, len) };
                    bytes.extend([&head[..], &(command % 6).to_be_bytes(), &1u64.to_be_bytes(), &offset.to_be_bytes(), &len.to_be_bytes()].concat());
                }
            }
        }
        let mut reader = socket.try_clone().unwrap();
        let drain = std::thread::spawn(move || io::copy(&mut reader, &mut io::sink()));
        let _ = socket.write_all(&bytes);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        let _ = server.join().unwrap();
        drop(socket);
        let _ = drain.join().unwrap();
    }
}
