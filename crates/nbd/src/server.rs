//! [`serve`]: a server for one client, which only reads.
//!
//! It gives a process that may make no connections of its own the content of something that another process reads. So it
//! has what [`crate::Client`] uses: the fixed newstyle handshake, structured replies, and reads by several threads.
//!
//! - S1. No bytes of a client cause a panic, or an allocation of more than [`READ_MAX`] for each thread.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use parking_lot::Mutex;

use crate::wire::{self, BigEndianFields, CommandCode, chunk, info, option, option_reply};

/// Something that a server serves.
pub trait Content: Sync {
    /// Size in bytes.
    fn size_bytes(&self) -> u64;

    /// Fills `buf` from `offset`. The range is inside of the content.
    ///
    /// # Errors
    /// The text is sent to the client.
    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
}

/// Bytes of a read at most.
const READ_MAX: u32 = 4 << 20;
/// Bytes of an option's data at most.
const OPTION_MAX: u32 = 8192;
/// Options before the export is opened.
const NR_OPTIONS_MAX: usize = 64;
/// Bytes of a text of an error.
const TEXT_MAX: usize = 1024;

/// Serves content on a socket until the client leaves. `nr_threads` reads run at once.
///
/// # Errors
/// The socket fails; the client breaks the protocol.
pub fn serve(socket: &UnixStream, content: &impl Content, nr_threads: usize) -> io::Result<()> {
    if !negotiate(socket, content.size_bytes())? {
        return Ok(());
    }
    let (requests, replies) = (Mutex::new(socket), Mutex::new(socket));
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..nr_threads.max(1)).map(|_| scope.spawn(|| answer(content, &requests, &replies))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
            thread.join().unwrap_or_else(|_| Err(broken("a thread panicked")))
        };
        // All are joined before the first error counts.
        let ends: Vec<io::Result<()>> = threads.into_iter().map(join).collect();
        ends.into_iter().collect()
    })
}

fn broken(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn read_array<const N: usize>(mut socket: &UnixStream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    socket.read_exact(&mut bytes).map(|()| bytes)
}

/// Makes the handshake. Returns whether the client opened the export.
fn negotiate(mut socket: &UnixStream, size_bytes: u64) -> io::Result<bool> {
    let flags = wire::FIXED_NEWSTYLE | wire::NO_ZEROES;
    socket.write_all(
        &[&wire::SERVER_MAGIC.to_be_bytes()[..], &wire::OPTION_MAGIC.to_be_bytes(), &flags.to_be_bytes()].concat(),
    )?;
    if u32::from_be_bytes(read_array(socket)?) != u32::from(flags) {
        return Err(broken("the client knows no fixed newstyle handshake"));
    }
    let mut is_structured = false;
    for _ in 0..NR_OPTIONS_MAX {
        let head: [u8; 16] = read_array(socket)?;
        let mut fields = BigEndianFields(&head);
        let (magic, number, len) = (fields.u64(), fields.u32().unwrap_or(0), fields.u32().unwrap_or(u32::MAX));
        if magic != Some(wire::OPTION_MAGIC) || len > OPTION_MAX {
            return Err(broken("the client sends no option"));
        }
        let mut data = vec![0; usize::try_from(len).unwrap_or(0)];
        socket.read_exact(&mut data)?;
        match number {
            option::STRUCTURED_REPLY => {
                is_structured = true;
                socket.write_all(&wire::option_reply(number, option_reply::ACK, &[]))?;
            }
            option::GO if is_structured => {
                let export = [
                    &info::EXPORT.to_be_bytes()[..],
                    &size_bytes.to_be_bytes(),
                    &(wire::HAS_FLAGS | wire::READ_ONLY).to_be_bytes(),
                ];
                socket.write_all(&wire::option_reply(number, option_reply::INFO, &export.concat()))?;
                let blocks = [
                    &info::BLOCK_SIZE.to_be_bytes()[..],
                    &1u32.to_be_bytes(),
                    &4096u32.to_be_bytes(),
                    &READ_MAX.to_be_bytes(),
                ];
                socket.write_all(&wire::option_reply(number, option_reply::INFO, &blocks.concat()))?;
                socket.write_all(&wire::option_reply(number, option_reply::ACK, &[]))?;
                return Ok(true);
            }
            option::ABORT => return Ok(false),
            _ => socket.write_all(&wire::option_reply(number, option_reply::ERR_UNSUP, &[]))?,
        }
    }
    Err(broken("the client sends too many options"))
}

/// Answers requests, in one of several threads.
fn answer(content: &impl Content, requests: &Mutex<&UnixStream>, replies: &Mutex<&UnixStream>) -> io::Result<()> {
    let mut buf = Vec::new();
    loop {
        let head = {
            let turn = requests.lock();
            let mut socket = *turn;
            let mut head = [0; wire::REQUEST_LEN];
            match socket.read_exact(&mut head) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                done => done?,
            }
            let request = wire::parse_request(&head).ok_or_else(|| broken("the client sends no request"))?;
            match request.command {
                Some(CommandCode::Disconnect) => {
                    let _ = socket.shutdown(std::net::Shutdown::Both);
                    return Ok(());
                }
                // Nobody reads the data that follows.
                Some(CommandCode::Write) => {
                    let _ = socket.shutdown(std::net::Shutdown::Both);
                    return Err(broken("the client writes to an export that is read-only"));
                }
                _ => {}
            }
            request
        };
        let done = match head.command {
            Some(CommandCode::Read) => read(content, head.offset, head.len, &mut buf),
            Some(CommandCode::Flush) => Ok(()),
            _ => Err((wire::EPERM, "the export is read-only".to_owned())),
        };
        let is_read = head.command == Some(CommandCode::Read);
        let parts: [&[u8]; 2] = match &done {
            Ok(()) if is_read => [&head.offset.to_be_bytes(), &buf],
            Ok(()) => [&[], &[]],
            Err((number, text)) => {
                let text = text.get(..TEXT_MAX).unwrap_or(text).as_bytes();
                let len = u16::try_from(text.len()).unwrap_or(0);
                buf = [&number.to_be_bytes()[..], &len.to_be_bytes(), text].concat();
                [&buf, &[]]
            }
        };
        let kind = match done {
            Ok(()) if is_read => chunk::OFFSET_DATA,
            Ok(()) => chunk::NONE,
            Err(_) => chunk::ERROR | 1,
        };
        let header = wire::chunk_header(kind, head.cookie, parts.iter().map(|part| part.len()).sum());
        let turn = replies.lock();
        let mut socket = *turn;
        for part in [&header[..], parts[0], parts[1]] {
            socket.write_all(part)?;
        }
    }
}

/// Reads into `buf`. The error is the protocol's number, and a text.
fn read(content: &impl Content, offset: u64, len: u32, buf: &mut Vec<u8>) -> Result<(), (u32, String)> {
    let is_inside = offset.checked_add(u64::from(len)).is_some_and(|end| end <= content.size_bytes());
    if len == 0 || len > READ_MAX || !is_inside {
        return Err((wire::EINVAL, "a read of a wrong length or place".to_owned()));
    }
    buf.clear();
    buf.resize(usize::try_from(len).unwrap_or(0), 0);
    content.read(offset, buf).map_err(|error| (wire::EIO, error.to_string()))
}
