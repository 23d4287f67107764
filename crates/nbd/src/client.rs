//! [`Client`]: an export, over one connection or several.
//!
//! - N1. After a connection was lost, or a flush or a durable write failed, writes and flushes fail for good (I2 of the crate): the server may
//!   have lost what it had answered, and a new connection does not know that.
//! - N2. Reads get a new connection, unless writes were not flushed when the old one was lost: the new one might return what
//!   was there before these writes. While the server is away, the first read waits for it, and later reads fail at once.

use std::io::{self, IoSlice, IoSliceMut};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;

use crate::buffers::{copy_to, push_part};
use crate::connection::{NR_PIECES_MAX, Piece, RequestError, ServerError, SharedConnection, Transfer};
use crate::dial::{Dialed, dial_with};
use crate::error::NbdError;
use crate::handshake::{ExportInfo, negotiate};
use crate::tls::TlsClient;
use crate::url::NbdUrl;
use crate::wire::{self, CommandCode};

/// Time limits, and the number of connections.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How long connecting and the handshake may take.
    pub connect: Duration,
    /// How long a server may send nothing while it has a request.
    pub reply: Duration,
    /// How long the first read after a loss tries to connect again.
    pub revive: Duration,
    /// Connections, if the server permits several.
    pub nr_connections: usize,
}

impl Default for Settings {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { connect: seconds(10), reply: seconds(60), revive: seconds(5), nr_connections: 4 }
    }
}

/// An open export.
#[derive(Debug)]
pub struct Client {
    url: NbdUrl,
    tls: Option<TlsClient>,
    identity: String,
    settings: Settings,
    export: ExportInfo,
    connections: Vec<Mutex<Arc<SharedConnection>>>,
    /// Chooses the connection of the next operation.
    turn: AtomicUsize,
    /// Why no write and no flush succeeds any more (N1).
    failure: OnceLock<String>,
    /// Counts each change twice: when it begins, and when it ends.
    changes: AtomicU64,
    /// The count of changes at the start of the last flush that succeeded. A change that ended before that is durable.
    flushed: AtomicU64,
    revival: Mutex<Revival>,
}

/// Attempts to get a new connection (N2).
#[derive(Debug, Default)]
struct Revival {
    /// Until when reads wait for the server.
    until: Option<Instant>,
    /// No attempt is made before this time.
    next: Option<Instant>,
}

/// Bytes of a read or write that the server gets as one request. Smaller ones let it work while data is on its way.
const PIECE_LEN: u32 = 512 << 10;
/// Bytes of a discard that the server gets as one request.
const TRIM_LEN: u32 = 1 << 30;
/// Zeros that are not sent have at least this many bytes. A server may take longer for a few zeros than for a write.
const ZEROES_LEN: u32 = 64 << 10;
/// How long a further connection may take. A server that permits several may still be at its limit.
const FURTHER_PATIENCE: Duration = Duration::from_secs(2);
/// The pause between attempts to connect again while a read waits.
const ATTEMPT_PAUSE: Duration = Duration::from_millis(100);
/// The pause between attempts to connect again while no read waits.
const LATER_PAUSE: Duration = Duration::from_secs(1);
/// How often a read gets a new connection.
const NR_REVIVALS_MAX: usize = 3;

impl Client {
    /// Makes the handshake on a socket. Makes further connections if the server says that a flush covers all of them.
    ///
    /// # Errors
    /// The server cannot open the export.
    pub fn open(dialed: Dialed, settings: Settings) -> Result<Self, NbdError> {
        let (url, tls, identity) = (dialed.url.clone(), dialed.tls.clone(), dialed.identity().to_owned());
        let (first, export) = connect(dialed, settings.connect, settings.reply)?;
        let mut connections = vec![Mutex::new(Arc::new(first))];
        while export.flags.can_multi_conn() && connections.len() < settings.nr_connections {
            let patience = settings.connect.min(FURTHER_PATIENCE);
            let further =
                dial_with(&url, tls.clone(), patience).and_then(|dialed| connect(dialed, patience, settings.reply));
            match further {
                Ok((connection, same)) if same == export => connections.push(Mutex::new(Arc::new(connection))),
                _ => break,
            }
        }
        Ok(Self {
            url,
            tls,
            identity,
            settings,
            export,
            connections,
            turn: AtomicUsize::new(0),
            failure: OnceLock::new(),
            changes: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            revival: Mutex::default(),
        })
    }

    /// Makes reads fail at once while the server is away (N2), because the caller has another copy, or writes too.
    #[must_use]
    pub fn without_waiting(mut self) -> Self {
        self.settings.revive = Duration::ZERO;
        self
    }

    /// The size, the abilities and the block sizes of the export, from the handshake.
    pub fn export(&self) -> &ExportInfo {
        &self.export
    }

    /// What tells exports apart ([`Dialed::identity`]).
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// The number of connections.
    pub fn nr_connections(&self) -> usize {
        self.connections.len()
    }

    /// Fills `bufs` from `offset`.
    ///
    /// # Errors
    /// `UnexpectedEof` past the end of the export; the server's error; the server is away.
    pub fn read(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        let len: usize = bufs.iter().map(|buf| buf.len()).sum();
        self.check_range(offset, len, io::ErrorKind::UnexpectedEof)?;
        if self.is_aligned(offset, len) {
            return self.read_blocks(offset, len, bufs);
        }
        let block = u64::from(self.export.min_block);
        let start = offset.checked_div(block).unwrap_or(offset).saturating_mul(block);
        let end = offset.saturating_add(as_u64(len)).next_multiple_of(block).min(self.export.size_bytes);
        let skipped = as_len(offset.saturating_sub(start));
        let mut blocks = vec![0; as_len(end.saturating_sub(start))];
        let nr_bytes = blocks.len();
        self.read_blocks(start, nr_bytes, &mut [IoSliceMut::new(&mut blocks)])?;
        copy_to(bufs, blocks.get(skipped..).unwrap_or_default());
        Ok(())
    }

    fn read_blocks(&self, offset: u64, len: usize, bufs: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        for window in self.pieces(CommandCode::Read, offset, len).chunks(NR_PIECES_MAX) {
            let slot = self.slot()?;
            let mut connection = Arc::clone(&slot.lock());
            for attempt in 0..=NR_REVIVALS_MAX {
                match connection.run(window, Transfer::Read(bufs)) {
                    Ok(()) => break,
                    Err(RequestError::Server(error)) if error.number != wire::ESHUTDOWN => {
                        return Err(system_error(&error));
                    }
                    Err(lost) => {
                        let why = self.fail(&lost);
                        if attempt == NR_REVIVALS_MAX {
                            return Err(io::Error::new(io::ErrorKind::NotConnected, why));
                        }
                        connection = self.revive(slot, &connection, &why)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Writes all of `bufs` at `offset`. The data is durable after a later flush. Long runs of zeros are not sent, if the
    /// server writes them by itself.
    ///
    /// # Errors
    /// `WriteZero` past the end of the export; the server's error; a connection was lost (N1).
    pub fn write(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let mut pieces = self.pieces_to_write(offset, bufs)?;
        if self.export.flags.can_write_zeroes() {
            for piece in &mut pieces {
                if piece.len >= ZEROES_LEN
                    && is_zero(bufs, piece.start, piece.start.saturating_add(as_len(u64::from(piece.len))))
                {
                    piece.command = CommandCode::WriteZeroes;
                }
            }
        }
        pieces.chunks(NR_PIECES_MAX).try_for_each(|window| self.change(window, Transfer::Write(bufs)))
    }

    /// Writes all of `bufs` at `offset`, so that they are durable afterwards. `None` if the server has no such writes.
    /// Unlike [`Client::flush`], this makes no other writes durable.
    ///
    /// # Errors
    /// As for [`Client::write`]. No later flush succeeds, because the server may have lost the data.
    pub fn write_durably(&self, offset: u64, bufs: &[IoSlice<'_>]) -> Option<io::Result<()>> {
        self.export.flags.can_write_durably().then(|| {
            let mut pieces = self.pieces_to_write(offset, bufs)?;
            pieces.iter_mut().for_each(|piece| piece.is_durable = true);
            for window in pieces.chunks(NR_PIECES_MAX) {
                // Without other changes since the last flush, nothing that is not durable is left.
                let before = self.changes.load(Ordering::Acquire);
                let was_flushed = self.flushed.load(Ordering::Acquire) == before;
                self.change(window, Transfer::Write(bufs)).map_err(|error| self.lost_data("durable write", error))?;
                if was_flushed {
                    let after = before.saturating_add(2);
                    let _ = self.flushed.compare_exchange(before, after, Ordering::AcqRel, Ordering::Acquire);
                }
            }
            Ok(())
        })
    }

    /// The requests of a write.
    fn pieces_to_write(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<Vec<Piece>> {
        let len: usize = bufs.iter().map(|buf| buf.len()).sum();
        self.check_range(offset, len, io::ErrorKind::WriteZero)?;
        if !self.is_aligned(offset, len) {
            let text = format!("{} takes only writes of whole blocks of {} bytes", self.url, self.export.min_block);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(self.pieces(CommandCode::Write, offset, len))
    }

    /// Notes that the server may have lost data (N1).
    fn lost_data(&self, what: &str, error: io::Error) -> io::Error {
        let _ = self.failure.set(format!("an earlier {what} failed: {error}"));
        error
    }

    /// Makes all writes durable that succeeded before.
    ///
    /// # Errors
    /// The server's error; a connection was lost, or an earlier flush failed (N1).
    pub fn flush(&self) -> io::Result<()> {
        let changes = self.changes.load(Ordering::Acquire);
        let done = self.change(&[Piece::of(CommandCode::Flush, 0, 0)], Transfer::Nothing);
        done.map_err(|error| self.lost_data("flush", error))?;
        self.flushed.fetch_max(changes, Ordering::AcqRel);
        Ok(())
    }

    /// Whether the server tells which ranges read as zeros.
    pub fn tells_zeros(&self) -> bool {
        self.connections.first().is_some_and(|connection| connection.lock().tells_zeros())
    }

    /// The first place from `offset` on that may have anything but zeros, or the end of the export. Without the server's
    /// help ([`Client::tells_zeros`]), that is `offset` itself.
    ///
    /// # Errors
    /// `TimedOut` after `until`: a server may tell of a few bytes at a time; the server's error; a connection was lost.
    pub fn next_data(&self, offset: u64, until: Instant) -> io::Result<u64> {
        let end = self.export.size_bytes;
        if !self.tells_zeros() {
            return Ok(offset.min(end));
        }
        let block = self.export.min_block.max(1);
        let most = u32::MAX.checked_div(block).unwrap_or(0).saturating_mul(block);
        let mut at = offset.checked_div(u64::from(block)).unwrap_or(0).saturating_mul(u64::from(block));
        while at < end {
            if Instant::now() > until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let len = u32::try_from(end.saturating_sub(at)).unwrap_or(most).min(most);
            let mut ranges = Vec::new();
            let connection = Arc::clone(&self.slot()?.lock());
            let piece = Piece::of(CommandCode::BlockStatus, at, len);
            match connection.run(&[piece], Transfer::Status(&mut ranges)) {
                Ok(()) => {}
                Err(RequestError::Server(error)) if error.number != wire::ESHUTDOWN => {
                    return Err(system_error(&error));
                }
                Err(lost) => return Err(io::Error::new(io::ErrorKind::NotConnected, self.fail(&lost))),
            }
            for (len, is_zero) in ranges {
                if !is_zero {
                    return Ok(at.max(offset).min(end.max(offset)));
                }
                at = at.saturating_add(u64::from(len));
            }
        }
        Ok(end.max(offset))
    }

    /// Discards a range, whose content is undefined afterwards. Does nothing if the server takes no discards.
    ///
    /// # Errors
    /// As for [`Client::write`].
    pub fn trim(&self, offset: u64, len_bytes: u64) -> io::Result<()> {
        if !self.export.flags.can_trim() {
            return Ok(());
        }
        let block = u64::from(self.export.min_block);
        let end = offset.saturating_add(len_bytes).min(self.export.size_bytes);
        let end = end.checked_div(block).unwrap_or(end).saturating_mul(block);
        let mut at = offset.next_multiple_of(block);
        while at < end {
            let len = u32::try_from(end.saturating_sub(at)).unwrap_or(TRIM_LEN).min(TRIM_LEN);
            self.change(&[Piece::of(CommandCode::Trim, at, len)], Transfer::Nothing)?;
            at = at.saturating_add(u64::from(len));
        }
        Ok(())
    }

    /// Makes requests that change the export. A lost connection ends all changes (N1).
    fn change(&self, pieces: &[Piece], transfer: Transfer<'_, '_>) -> io::Result<()> {
        let is_flush = pieces.iter().any(|piece| piece.command == CommandCode::Flush);
        if let Some(why) = self.failure.get() {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, why.clone()));
        }
        let connection = Arc::clone(&self.slot()?.lock());
        if !is_flush {
            self.changes.fetch_add(1, Ordering::AcqRel);
        }
        let done = connection.run(pieces, transfer);
        if !is_flush {
            self.changes.fetch_add(1, Ordering::AcqRel);
        }
        match done {
            Ok(()) => {}
            Err(RequestError::Server(error)) if error.number != wire::ESHUTDOWN => return Err(system_error(&error)),
            Err(lost) => return Err(io::Error::new(io::ErrorKind::BrokenPipe, self.fail(&lost))),
        }
        // Another connection may have been lost meanwhile.
        match self.failure.get().filter(|_| is_flush) {
            Some(why) => Err(io::Error::new(io::ErrorKind::BrokenPipe, why.clone())),
            None => Ok(()),
        }
    }

    /// Notes a loss (N1), and returns the message.
    fn fail(&self, lost: &RequestError) -> String {
        let why = match lost {
            RequestError::Lost(why) => why.as_ref(),
            RequestError::Server(_) => "the server shuts down",
        };
        let text = format!("the connection to {} is lost: {why}", self.url);
        let _ = self.failure.set(text.clone());
        text
    }

    /// The connection of the next operation.
    fn slot(&self) -> io::Result<&Mutex<Arc<SharedConnection>>> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let index = turn.checked_rem(self.connections.len()).unwrap_or(0);
        self.connections.get(index).ok_or_else(|| io::Error::from(io::ErrorKind::NotConnected))
    }

    /// Replaces a lost connection, for reads only (N2).
    fn revive(
        &self,
        slot: &Mutex<Arc<SharedConnection>>,
        lost: &Arc<SharedConnection>,
        why: &str,
    ) -> io::Result<Arc<SharedConnection>> {
        let mut revival = self.revival.lock();
        let current = Arc::clone(&slot.lock());
        if !Arc::ptr_eq(&current, lost) && !current.is_lost() {
            return Ok(current);
        }
        if self.changes.load(Ordering::Acquire) != self.flushed.load(Ordering::Acquire) {
            let text = format!("{why}; it had writes that were not flushed, which the server may have lost");
            return Err(io::Error::new(io::ErrorKind::NotConnected, text));
        }
        let away = |text: &dyn std::fmt::Display| io::Error::new(io::ErrorKind::NotConnected, format!("{why}; {text}"));
        let now = Instant::now();
        if revival.next.is_some_and(|next| now < next) {
            return Err(away(&"the server is away"));
        }
        let until = *revival.until.get_or_insert_with(|| now.checked_add(self.settings.revive).unwrap_or(now));
        loop {
            let left = until.saturating_duration_since(Instant::now()).max(LATER_PAUSE).min(self.settings.connect);
            let made = dial_with(&self.url, self.tls.clone(), left)
                .and_then(|dialed| connect(dialed, left, self.settings.reply));
            match made {
                Ok((connection, export)) if export.size_bytes == self.export.size_bytes => {
                    let connection = Arc::new(connection);
                    *slot.lock() = Arc::clone(&connection);
                    *revival = Revival::default();
                    return Ok(connection);
                }
                Ok(_) => {
                    revival.next = Instant::now().checked_add(LATER_PAUSE);
                    return Err(away(&"the export has another size by now"));
                }
                // A confined process makes no sockets.
                Err(error) if is_denied(&error) || Instant::now() >= until => {
                    revival.next = Instant::now().checked_add(LATER_PAUSE);
                    return Err(away(&error));
                }
                Err(_) => std::thread::sleep(ATTEMPT_PAUSE),
            }
        }
    }

    fn is_aligned(&self, offset: u64, len: usize) -> bool {
        let mask = u64::from(self.export.min_block).saturating_sub(1);
        (offset | as_u64(len)) & mask == 0
    }

    fn check_range(&self, offset: u64, len: usize, kind: io::ErrorKind) -> io::Result<()> {
        match offset.checked_add(as_u64(len)) {
            Some(end) if end <= self.export.size_bytes => Ok(()),
            _ => {
                let size = self.export.size_bytes;
                Err(io::Error::new(kind, format!("{len} bytes at {offset} end past the export's {size} bytes")))
            }
        }
    }

    /// Cuts a range into requests, at multiples of their largest length.
    fn pieces(&self, command: CommandCode, offset: u64, len: usize) -> Vec<Piece> {
        let most = PIECE_LEN.max(self.export.preferred_block).min(self.export.max_block).max(1);
        let mut pieces = Vec::new();
        let mut start = 0usize;
        while start < len {
            let at = offset.saturating_add(as_u64(start));
            let used = u32::try_from(at.checked_rem(u64::from(most)).unwrap_or(0)).unwrap_or(0);
            let left = u32::try_from(len.saturating_sub(start)).unwrap_or(u32::MAX);
            let piece = Piece { start, ..Piece::of(command, at, most.saturating_sub(used).min(left)) };
            pieces.push(piece);
            start = start.saturating_add(usize::try_from(piece.len).unwrap_or(usize::MAX));
        }
        pieces
    }
}

/// Makes the handshake and the connection.
fn connect(dialed: Dialed, patience: Duration, reply: Duration) -> Result<(SharedConnection, ExportInfo), NbdError> {
    let server = dialed.url.to_string();
    let negotiated = negotiate(dialed, patience)?;
    let export = negotiated.export;
    let connection = SharedConnection::new(negotiated, reply).map_err(|source| NbdError::Io { server, source })?;
    Ok((connection, export))
}

/// Whether the system denied a socket.
fn is_denied(error: &NbdError) -> bool {
    matches!(error, NbdError::Connect { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
}

/// The system's error for an error number of the protocol, which has the numbers of Linux.
/// `EIO` has the server's text, because it says nothing by itself.
fn system_error(error: &ServerError) -> io::Error {
    const KNOWN: [u32; 6] = [1, 12, 22, 28, 75, 95];
    match KNOWN.iter().find(|known| **known == error.number).and_then(|known| i32::try_from(*known).ok()) {
        Some(number) => io::Error::from_raw_os_error(number),
        None if error.text.is_empty() => io::Error::from(Errno::IO),
        None => io::Error::other(format!("{}; the server says: {}", io::Error::from(Errno::IO), error.text)),
    }
}

/// Whether the bytes from `start` to `end` of buffers are zeros.
fn is_zero(bufs: &[IoSlice<'_>], start: usize, end: usize) -> bool {
    let mut parts = Vec::new();
    push_part(&mut parts, bufs, start, end);
    let is_zero = |part: &IoSlice<'_>| {
        let (words, rest) = part.as_chunks::<16>();
        words.iter().all(|word| *word == [0; 16]) && rest.iter().all(|byte| *byte == 0)
    };
    parts.iter().all(is_zero)
}

fn as_u64(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}

fn as_len(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}
