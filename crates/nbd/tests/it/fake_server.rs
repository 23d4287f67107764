//! A server of NBD in memory, whose replies a test chooses.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ubtrfs_nbd::{Client, Dialed, NbdError, NbdUrl, Settings, dial};

/// Settings for tests: nothing waits for long.
pub(crate) const QUICK: Settings = Settings {
    connect: Duration::from_secs(5),
    reply: Duration::from_secs(5),
    revive: Duration::from_secs(2),
    nr_connections: 4,
};

/// `NBD_FLAG_HAS_FLAGS`, and flags for a server that flushes and trims.
pub(crate) const FLAGS: u16 = 1 | 1 << 2 | 1 << 5;
pub(crate) const MULTI_CONN: u16 = 1 << 8;
/// `NBD_FLAG_SEND_FUA`.
pub(crate) const DURABLE_WRITES: u16 = 1 << 3;
/// `NBD_FLAG_SEND_WRITE_ZEROES`.
pub(crate) const WRITE_ZEROES: u16 = 1 << 6;
/// The number of the context that tells which ranges read as zeros.
pub(crate) const CONTEXT: u32 = 77;

/// A socket, with TLS or without.
pub(crate) trait Stream: Read + Write {}

impl<S: Read + Write> Stream for S {}

/// A request that arrived.
#[derive(Clone, Debug)]
pub(crate) struct Arrived {
    pub(crate) flags: u16,
    pub(crate) command: u16,
    pub(crate) cookie: u64,
    pub(crate) offset: u64,
    pub(crate) len: u32,
    pub(crate) data: Vec<u8>,
}

/// How a server greets.
#[derive(Clone, Copy)]
pub(crate) struct Greeting {
    pub(crate) size: u64,
    pub(crate) flags: u16,
    pub(crate) is_structured: bool,
    /// Whether the server tells which ranges read as zeros.
    pub(crate) tells_zeros: bool,
    /// The smallest, preferred and largest block.
    pub(crate) blocks: Option<[u32; 3]>,
}

impl Default for Greeting {
    fn default() -> Self {
        Self { size: 64 << 20, flags: FLAGS, is_structured: true, tells_zeros: false, blocks: None }
    }
}

pub(crate) fn read_array<const N: usize>(socket: &mut impl Stream) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    socket.read_exact(&mut bytes).map(|()| bytes)
}

/// Reads an option of the client: its number, and its data.
pub(crate) fn read_option(socket: &mut impl Stream) -> io::Result<(u32, Vec<u8>)> {
    let head: [u8; 16] = read_array(socket)?;
    assert_eq!(&head[..8], b"IHAVEOPT");
    let mut data = vec![0; u32::from_be_bytes(head[12..].try_into().unwrap()) as usize];
    socket.read_exact(&mut data)?;
    Ok((u32::from_be_bytes(head[8..12].try_into().unwrap()), data))
}

/// The bytes of a reply to an option.
pub(crate) fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap();
    let magic = 0x0003_e889_0455_65a9u64.to_be_bytes();
    [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &len.to_be_bytes(), data].concat()
}

/// The first bytes of a server.
pub(crate) fn hello() -> Vec<u8> {
    [&b"NBDMAGICIHAVEOPT"[..], &3u16.to_be_bytes()].concat()
}

/// Makes the handshake of a server.
pub(crate) fn greet(socket: &mut impl Stream, greeting: Greeting) -> io::Result<()> {
    socket.write_all(&hello())?;
    assert_eq!(read_array::<4>(socket)?, 3u32.to_be_bytes());
    take_options(socket, greeting)
}

/// Answers the options of a client.
pub(crate) fn take_options(socket: &mut impl Stream, greeting: Greeting) -> io::Result<()> {
    assert_eq!(read_option(socket)?.0, 8);
    let kind = if greeting.is_structured { 1 } else { 1 << 31 | 1 };
    socket.write_all(&option_reply(8, kind, &[]))?;
    if greeting.is_structured {
        let (option, data) = read_option(socket)?;
        assert_eq!((option, &data[4..10], &data[data.len() - 15..]), (10, &b"export"[..], &b"base:allocation"[..]));
        if greeting.tells_zeros {
            let context = [&CONTEXT.to_be_bytes()[..], b"base:allocation"].concat();
            socket.write_all(&option_reply(10, 4, &context))?;
        }
        let kind = if greeting.tells_zeros { 1 } else { 1 << 31 | 1 };
        socket.write_all(&option_reply(10, kind, &[]))?;
    }
    let (option, data) = read_option(socket)?;
    assert_eq!((option, &data[4..data.len() - 4]), (7, &b"export"[..]));
    let export = [&0u16.to_be_bytes()[..], &greeting.size.to_be_bytes(), &greeting.flags.to_be_bytes()].concat();
    socket.write_all(&option_reply(7, 3, &export))?;
    if let Some(blocks) = greeting.blocks {
        let blocks: Vec<u8> = blocks.iter().flat_map(|block| block.to_be_bytes()).collect();
        socket.write_all(&option_reply(7, 3, &[&3u16.to_be_bytes()[..], &blocks].concat()))?;
    }
    socket.write_all(&option_reply(7, 1, &[]))
}

/// Reads a request.
pub(crate) fn read_request(socket: &mut impl Stream) -> io::Result<Arrived> {
    let head: [u8; 28] = read_array(socket)?;
    assert_eq!(head[..4], [0x25, 0x60, 0x95, 0x13]);
    let flags = u16::from_be_bytes(head[4..6].try_into().unwrap());
    let command = u16::from_be_bytes(head[6..8].try_into().unwrap());
    let len = u32::from_be_bytes(head[24..].try_into().unwrap());
    let mut data = vec![0; if command == 1 { len as usize } else { 0 }];
    socket.read_exact(&mut data)?;
    let number = |at: usize| u64::from_be_bytes(head[at..at + 8].try_into().unwrap());
    Ok(Arrived { flags, command, cookie: number(8), offset: number(16), len, data })
}

pub(crate) fn simple(cookie: u64, error: u32, data: &[u8]) -> Vec<u8> {
    [&0x6744_6698u32.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes(), data].concat()
}

pub(crate) fn chunk(cookie: u64, is_last: bool, kind: u16, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).unwrap();
    let flags = u16::from(is_last);
    let magic = 0x668e_33efu32.to_be_bytes();
    [&magic[..], &flags.to_be_bytes(), &kind.to_be_bytes(), &cookie.to_be_bytes(), &len.to_be_bytes(), payload].concat()
}

pub(crate) fn data_chunk(cookie: u64, is_last: bool, offset: u64, data: &[u8]) -> Vec<u8> {
    chunk(cookie, is_last, 1, &[&offset.to_be_bytes(), data].concat())
}

pub(crate) fn hole_chunk(cookie: u64, is_last: bool, offset: u64, len: u32) -> Vec<u8> {
    chunk(cookie, is_last, 2, &[&offset.to_be_bytes()[..], &len.to_be_bytes()].concat())
}

/// A chunk with the status of ranges: their lengths, and whether they read as zeros.
pub(crate) fn status_chunk(cookie: u64, context: u32, ranges: &[(u32, bool)]) -> Vec<u8> {
    let ranges = ranges.iter().flat_map(|(len, is_zero)| [*len, if *is_zero { 3 } else { 0 }]);
    let payload: Vec<u8> = [context].into_iter().chain(ranges).flat_map(u32::to_be_bytes).collect();
    chunk(cookie, true, 5, &payload)
}

/// The end of a search for data that has time.
pub(crate) fn later() -> Instant {
    Instant::now() + QUICK.connect
}

/// Starts a client whose server is `serve`, which gets the socket after the handshake.
pub(crate) fn with_server(
    greeting: Greeting,
    serve: impl FnOnce(&mut UnixStream) -> io::Result<()> + Send + 'static,
) -> (Client, JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let server = std::thread::spawn(move || {
        let mut socket = theirs;
        greet(&mut socket, greeting).unwrap();
        // A client that gave up ends the stream.
        let _ = serve(&mut socket);
    });
    let settings = Settings { revive: Duration::ZERO, reply: Duration::from_millis(700), ..QUICK };
    (Client::open(Dialed::of_socket(ours), settings).unwrap(), server)
}

/// A server in memory behind a socket with a path, for any number of clients one after another or at once.
pub(crate) struct MemoryServer {
    dir: tempfile::TempDir,
    pub(crate) content: Arc<Mutex<Vec<u8>>>,
    /// For each request that arrived, the number of the connection, the command and its flags.
    pub(crate) log: Arc<Mutex<Vec<(usize, u16, u16)>>>,
    sockets: Arc<Mutex<Vec<UnixStream>>>,
}

impl MemoryServer {
    pub(crate) fn start(greeting: Greeting) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let server = Self {
            dir,
            content: Arc::new(Mutex::new(vec![0; greeting.size as usize])),
            log: Arc::default(),
            sockets: Arc::default(),
        };
        let (content, log, sockets) =
            (Arc::clone(&server.content), Arc::clone(&server.log), Arc::clone(&server.sockets));
        std::thread::spawn(move || {
            for (nr, socket) in listener.incoming().flatten().enumerate() {
                sockets.lock().unwrap().push(socket.try_clone().unwrap());
                let (content, log) = (Arc::clone(&content), Arc::clone(&log));
                std::thread::spawn(move || {
                    let mut socket = socket;
                    let _ = greet(&mut socket, greeting).and_then(|()| serve(&mut socket, &content, &log, nr));
                });
            }
        });
        server
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    pub(crate) fn client(&self) -> Result<Client, NbdError> {
        let url = format!("nbd+unix:///export?socket={}", self.path().to_str().unwrap());
        let url = NbdUrl::of_path(Path::new(&url)).unwrap().unwrap();
        Client::open(dial(&url, QUICK.connect)?, QUICK)
    }

    /// Ends all connections. The server takes new ones.
    pub(crate) fn cut(&self) {
        for socket in self.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }
}

pub(crate) fn serve(
    socket: &mut impl Stream,
    content: &Mutex<Vec<u8>>,
    log: &Mutex<Vec<(usize, u16, u16)>>,
    nr: usize,
) -> io::Result<()> {
    loop {
        let request = read_request(socket)?;
        log.lock().unwrap().push((nr, request.command, request.flags));
        let range = request.offset as usize..request.offset as usize + request.len as usize;
        let reply = match request.command {
            0 => data_chunk(request.cookie, true, request.offset, &content.lock().unwrap()[range]),
            1 => {
                content.lock().unwrap()[range].copy_from_slice(&request.data);
                simple(request.cookie, 0, &[])
            }
            2 => return Ok(()),
            6 => {
                content.lock().unwrap()[range].fill(0);
                simple(request.cookie, 0, &[])
            }
            7 => {
                let is_zero = |block: &[u8]| block.iter().all(|byte| *byte == 0);
                let content = content.lock().unwrap();
                // At most eight ranges, so that a client has to ask again.
                let mut ranges: Vec<(u32, bool)> = Vec::new();
                for block in content[range].chunks(4096) {
                    let nr_ranges = ranges.len();
                    match ranges.last_mut() {
                        Some((len, last)) if *last == is_zero(block) => *len += 4096,
                        _ if nr_ranges == 8 => break,
                        _ => ranges.push((4096, is_zero(block))),
                    }
                }
                status_chunk(request.cookie, CONTEXT, &ranges)
            }
            _ => simple(request.cookie, 0, &[]),
        };
        socket.write_all(&reply)?;
    }
}
