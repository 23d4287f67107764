//! Bytes of a hostile NBD server.

use std::io::{IoSlice, IoSliceMut, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ubtrfs_nbd::{Client, Dialed, Settings};

/// The longest input. It fits into the buffer of a socket.
const INPUT_MAX: usize = 128 << 10;

/// Takes the input as all that a server sends. Makes the handshake, then reads, writes, discards and flushes.
///
/// # Panics
/// A read succeeds without data, or the system has no sockets.
pub fn nbd(data: &[u8]) {
    let (ours, mut theirs) = UnixStream::pair().expect("sockets");
    theirs.set_nonblocking(true).expect("a socket");
    if theirs.write_all(&data[..data.len().min(INPUT_MAX)]).is_err() {
        return;
    }
    theirs.shutdown(Shutdown::Write).expect("a socket");
    let second = Duration::from_secs(1);
    let settings = Settings { connect: second, reply: second, revive: Duration::ZERO, nr_connections: 2 };
    let Ok(client) = Client::open(Dialed::of_socket(ours), settings) else { return };
    let mut buf = vec![0; 1 << 20];
    for len in [4096, 65536, 1 << 20] {
        if client.read(4096, &mut [IoSliceMut::new(&mut buf[..len])]).is_ok() {
            assert!(data.len() > 20, "a reply has a header");
        }
    }
    let _ = client.write(8192, &[IoSlice::new(&buf[..8192])]);
    let _ = client.trim(0, u64::MAX);
    let _ = client.flush();
}
