//! [`SharedConnection`]: requests of many threads in flight on one socket.
//!
//! A thread sends the requests of its operation with one system call where possible, then waits for their replies. One of
//! the waiting threads has the [`ReplyReader`] and reads the replies of all.
//!
//! ```text
//! sending --(all sent)--> waiting --(the reader is free: take)-----------> reading
//!                            ^ |                                          |  |  |
//!                            | +--(all replies arrived: wait)--> done <---+  |  |   put the reader back, wake a waiting thread
//!                            |                                               |  |
//!                            +--(data of another operation: hand over)-------+  +--> lost: wake all
//! ```
//!
//! - C1. Only the thread of an operation writes to the operation's buffers. So a thread that reads the header of another
//!   operation's data gives the reader and the header to that operation's thread. If that thread is still sending, it
//!   might wait for the server, and the server for a reader. So the data is then kept for it.
//! - C2. A thread waits for its turn to send only while it has no replies to read, so the server never waits for a thread
//!   that waits for the server. The replies to the requests of one turn fit into the socket's buffer, except for data.
//! - C3. After any failure the connection is lost, because nobody knows where the next reply begins.

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use ubtrfs_format::print::escaped;

use crate::buffers::{copy_to, part_mut, push_part};
use crate::dial::{NR_BUFS_MAX, Socket};
use crate::handshake::Negotiated;
use crate::received::ReceivedRanges;
use crate::wire::{self, BigEndianFields, CommandCode, ReplyHeader, chunk};

/// Requests that an operation may have.
pub(crate) const NR_PIECES_MAX: usize = 64;

/// A request of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) command: CommandCode,
    /// Whether a write is answered when it is durable.
    pub(crate) is_durable: bool,
    /// Offset in the export.
    pub(crate) offset: u64,
    /// Offset in the operation's buffers.
    pub(crate) start: usize,
    /// Bytes.
    pub(crate) len: u32,
}

impl Piece {
    /// The only request of an operation, or the first one.
    pub(crate) fn of(command: CommandCode, offset: u64, len: u32) -> Self {
        Self { command, is_durable: false, offset, start: 0, len }
    }
}

/// The buffers of an operation.
pub(crate) enum Transfer<'t, 'b> {
    Read(&'t mut [IoSliceMut<'b>]),
    Write(&'t [IoSlice<'b>]),
    /// The lengths of ranges, and whether they read as zeros.
    Status(&'t mut Vec<(u32, bool)>),
    Nothing,
}

/// Why an operation failed.
#[derive(Clone, Debug)]
pub(crate) enum RequestError {
    /// The server answered with an error.
    Server(ServerError),
    /// The connection is lost, for this reason.
    Lost(Arc<str>),
}

/// An error of the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ServerError {
    /// Its number in the protocol.
    pub(crate) number: u32,
    /// The server's words, for messages. They may be empty.
    pub(crate) text: Box<str>,
}

/// A socket on which requests are in flight.
#[derive(Debug)]
pub(crate) struct SharedConnection {
    socket: Socket,
    has_structured: bool,
    /// The server's number of the context that tells which ranges read as zeros.
    allocation: Option<u32>,
    /// How long an operation may last.
    limit: Duration,
    /// Held while a thread sends.
    sending: Mutex<()>,
    state: Mutex<InFlight>,
}

#[derive(Debug)]
struct InFlight {
    next_cookie: u64,
    next_operation: u64,
    requests: HashMap<u64, Request>,
    operations: HashMap<u64, PendingOperation>,
    /// `None` while a thread reads.
    reader: Option<ReplyReader>,
    lost: Option<Arc<str>>,
}

/// A request without its last reply.
#[derive(Debug)]
struct Request {
    operation: u64,
    piece: Piece,
    received: ReceivedRanges,
    error: Option<ServerError>,
}

impl Request {
    fn is_read(&self) -> bool {
        self.piece.command == CommandCode::Read
    }

    /// Whether the server may take long.
    fn is_slow(&self) -> bool {
        matches!(self.piece.command, CommandCode::Flush | CommandCode::Trim) || self.piece.is_durable
    }
}

#[derive(Debug)]
struct PendingOperation {
    /// Requests without their last reply.
    nr_pending: usize,
    /// The first error of the server.
    error: Option<ServerError>,
    /// Whether the thread waits and can be woken.
    is_waiting: bool,
    /// The reader, and the header of a reply of this operation (C1).
    handed: Option<(ReplyReader, ReplyHeader)>,
    /// Data that arrived while the thread was sending (C1): its place in the buffers, and the bytes or their number if
    /// they are zeros.
    early: Vec<(usize, EarlyData)>,
    /// The ranges that a request for their status got.
    status: Vec<(u32, bool)>,
    wake: Arc<Condvar>,
}

#[derive(Debug)]
enum EarlyData {
    Bytes(Vec<u8>),
    Zeros(usize),
}

/// The next step of the reading thread after a reply.
enum AfterReply {
    GoOn,
    /// All replies of the thread's own operation have arrived.
    Done,
    /// The data that follows belongs to another operation, whose thread waits.
    HandTo(u64),
}

impl SharedConnection {
    /// Makes a connection. `reply` limits the wait for the next bytes of the server.
    pub(crate) fn new(negotiated: Negotiated, reply: Duration) -> io::Result<Self> {
        negotiated.socket.set_patience(reply)?;
        let state = InFlight {
            next_cookie: 1,
            next_operation: 0,
            requests: HashMap::new(),
            operations: HashMap::new(),
            reader: Some(ReplyReader::default()),
            lost: None,
        };
        Ok(Self {
            socket: negotiated.socket,
            has_structured: negotiated.has_structured,
            allocation: negotiated.allocation,
            limit: reply.saturating_mul(SLOW),
            sending: Mutex::default(),
            state: Mutex::new(state),
        })
    }

    /// Whether the server tells which ranges read as zeros.
    pub(crate) fn tells_zeros(&self) -> bool {
        self.allocation.is_some()
    }

    /// Sends the requests of an operation, at most [`NR_PIECES_MAX`], and waits for their replies. `transfer` has the
    /// buffers for their commands.
    ///
    /// # Errors
    /// The server's first error; the loss of the connection.
    pub(crate) fn run(&self, pieces: &[Piece], mut transfer: Transfer<'_, '_>) -> Result<(), RequestError> {
        let until = Instant::now().checked_add(self.limit);
        let (cookie, operation, wake) = self.register(pieces)?;
        if let Err(error) = self.send(cookie, pieces, &transfer) {
            self.lose(&match error.kind() {
                io::ErrorKind::WouldBlock => "the server takes no requests in time".to_owned(),
                _ => error.to_string(),
            });
        }
        self.wait(operation, &wake, until, &mut transfer)
    }

    /// Notes the requests of an operation. Returns the first cookie, the operation, and what wakes its thread.
    fn register(&self, pieces: &[Piece]) -> Result<(u64, u64, Arc<Condvar>), RequestError> {
        let mut state = self.state.lock();
        if let Some(why) = &state.lost {
            return Err(RequestError::Lost(Arc::clone(why)));
        }
        let (first, operation) = (state.next_cookie, state.next_operation);
        state.next_operation = operation.wrapping_add(1);
        for piece in pieces {
            let cookie = state.next_cookie;
            state.next_cookie = cookie.wrapping_add(1);
            let request = Request { operation, piece: *piece, received: ReceivedRanges::default(), error: None };
            state.requests.insert(cookie, request);
        }
        let wake = Arc::new(Condvar::new());
        let waiting = PendingOperation {
            nr_pending: pieces.len(),
            error: None,
            is_waiting: false,
            handed: None,
            early: Vec::new(),
            status: Vec::new(),
            wake: Arc::clone(&wake),
        };
        state.operations.insert(operation, waiting);
        Ok((first, operation, wake))
    }

    /// Sends the requests of an operation, with their data.
    fn send(&self, first: u64, pieces: &[Piece], transfer: &Transfer<'_, '_>) -> io::Result<()> {
        let cookies = (0u64..).map(|nr| first.wrapping_add(nr));
        let heads: Vec<_> = pieces
            .iter()
            .zip(cookies)
            .map(|(piece, cookie)| wire::request(piece.command, piece.is_durable, cookie, piece.offset, piece.len))
            .collect();
        let mut bufs = Vec::with_capacity(pieces.len().saturating_mul(2));
        for (piece, head) in pieces.iter().zip(&heads) {
            bufs.push(IoSlice::new(head));
            if let Transfer::Write(data) = transfer
                && piece.command == CommandCode::Write
            {
                push_part(&mut bufs, data, piece.start, piece.start.saturating_add(as_len(piece.len)));
            }
        }
        let mut rest = bufs.as_mut_slice();
        let _turn = self.sending.lock();
        while !rest.is_empty() {
            let sent = self.socket.send(rest)?;
            IoSlice::advance_slices(&mut rest, sent);
        }
        Ok(())
    }

    /// Waits for the replies of an operation.
    fn wait(
        &self,
        id: u64,
        wake: &Condvar,
        until: Option<Instant>,
        transfer: &mut Transfer<'_, '_>,
    ) -> Result<(), RequestError> {
        let mut state = self.state.lock();
        loop {
            let in_flight = &mut *state;
            let Some(operation) = in_flight.operations.get_mut(&id) else {
                return Err(RequestError::Lost("the operation is unknown".into()));
            };
            operation.is_waiting = false;
            if let Some((reader, header)) = operation.handed.take() {
                MutexGuard::unlocked(&mut state, || self.lead(reader, Some(header), id, until, transfer));
                continue;
            }
            if operation.nr_pending == 0 {
                let done = in_flight.operations.remove(&id);
                drop(state);
                return done.map_or(Ok(()), |operation| finished(operation, transfer));
            }
            if let Some(why) = &in_flight.lost {
                let why = Arc::clone(why);
                in_flight.operations.remove(&id);
                in_flight.requests.retain(|_, request| request.operation != id);
                return Err(RequestError::Lost(why));
            }
            if let Some(reader) = in_flight.reader.take() {
                MutexGuard::unlocked(&mut state, || self.lead(reader, None, id, until, transfer));
                continue;
            }
            operation.is_waiting = true;
            wake.wait(&mut state);
        }
    }

    /// Reads replies until all of the own operation have arrived, the reader is given to another thread, or the connection
    /// is lost.
    fn lead(
        &self,
        mut reader: ReplyReader,
        mut header: Option<ReplyHeader>,
        own: u64,
        until: Option<Instant>,
        transfer: &mut Transfer<'_, '_>,
    ) {
        reader.until = until;
        loop {
            let read = header.take().map_or_else(|| reader.header(&self.socket), Ok);
            let done = read.and_then(|header| match self.reply(&mut reader, header, own, transfer) {
                Ok(done) => Ok((header, done)),
                Err(why) if why == SILENT => Err(SILENT_IN_REPLY.to_owned()),
                Err(why) => Err(why),
            });
            match done {
                Ok((_, AfterReply::GoOn)) => {}
                Ok((_, AfterReply::Done)) => {
                    let mut state = self.state.lock();
                    state.reader = Some(reader);
                    if let Some(other) =
                        state.operations.values().find(|other| other.is_waiting && other.nr_pending > 0)
                    {
                        other.wake.notify_one();
                    }
                    return;
                }
                Ok((header, AfterReply::HandTo(other))) => {
                    if let Some(operation) = self.state.lock().operations.get_mut(&other) {
                        operation.handed = Some((reader, header));
                        operation.wake.notify_one();
                    }
                    return;
                }
                // Nothing of a reply was taken, so it can be awaited again.
                Err(why)
                    if why == SILENT
                        && self.has_slow_request()
                        && until.is_some_and(|until| Instant::now() < until) => {}
                Err(why) => return self.lose(&why),
            }
        }
    }

    fn has_slow_request(&self) -> bool {
        self.state.lock().requests.values().any(Request::is_slow)
    }

    /// Handles a reply after its header. The error is the reason why the connection is lost.
    fn reply(
        &self,
        reader: &mut ReplyReader,
        header: ReplyHeader,
        own: u64,
        transfer: &mut Transfer<'_, '_>,
    ) -> Result<AfterReply, String> {
        match header {
            ReplyHeader::Simple { error: 0, cookie } => {
                let (is_read, len) = self.look_up(cookie, |request| (request.is_read(), request.piece.len))?;
                match is_read {
                    false => self.finish(cookie, None, own),
                    true if self.has_structured => Err("the server answers a read with a simple reply".to_owned()),
                    true => {
                        self.data(reader, ArrivingData { cookie, len, has_offset: false, is_last: true }, own, transfer)
                    }
                }
            }
            ReplyHeader::Simple { error: number, cookie } => {
                self.finish(cookie, Some(ServerError { number, text: Box::default() }), own)
            }
            ReplyHeader::Chunk { .. } if !self.has_structured => {
                Err("the server sends a structured reply that nobody asked for".to_owned())
            }
            ReplyHeader::Chunk { is_last, kind: chunk::OFFSET_DATA, cookie, len } => {
                let len = len.checked_sub(8).filter(|len| *len > 0).ok_or("a chunk of data is too short")?;
                self.data(reader, ArrivingData { cookie, len, has_offset: true, is_last }, own, transfer)
            }
            ReplyHeader::Chunk { is_last, kind: chunk::OFFSET_HOLE, cookie, len: 12 } => {
                self.hole(reader, cookie, is_last, own, transfer)
            }
            ReplyHeader::Chunk { is_last, kind: chunk::BLOCK_STATUS, cookie, len } => {
                self.status(reader, cookie, len)?;
                if is_last { self.finish(cookie, None, own) } else { Ok(AfterReply::GoOn) }
            }
            ReplyHeader::Chunk { is_last: true, kind: chunk::NONE, cookie, len: 0 } => self.finish(cookie, None, own),
            ReplyHeader::Chunk { is_last, kind, cookie, len } if kind & chunk::ERROR != 0 => {
                if !(6..=ERROR_LEN_MAX).contains(&len) {
                    return Err("the server sends an error of a wrong length".to_owned());
                }
                let payload = reader.bytes(&self.socket, as_len(len))?;
                let error = server_error(&payload).ok_or("the server sends the error 0")?;
                match is_last {
                    true => self.finish(cookie, Some(error), own),
                    false => self.look_up(cookie, |request| {
                        request.error.get_or_insert(error);
                        AfterReply::GoOn
                    }),
                }
            }
            ReplyHeader::Chunk { kind, .. } => Err(format!("the server sends a wrong chunk of type {kind}")),
        }
    }

    /// Reads data, or decides that another thread does.
    fn data(
        &self,
        reader: &mut ReplyReader,
        arriving: ArrivingData,
        own: u64,
        transfer: &mut Transfer<'_, '_>,
    ) -> Result<AfterReply, String> {
        let ArrivingData { cookie, len, has_offset, is_last } = arriving;
        if let Some(other) = self.waiting_owner(cookie, own)? {
            return Ok(AfterReply::HandTo(other));
        }
        let offset = match has_offset {
            true => Some(reader.number(&self.socket)?),
            false => None,
        };
        let (owner, start) = self.arrived(cookie, offset, len)?;
        let len = as_len(len);
        if owner == own {
            let Transfer::Read(bufs) = transfer else { return Err(NO_READ.to_owned()) };
            let mut bufs = part_mut(bufs, start, start.saturating_add(len));
            reader.data(&self.socket, &mut bufs)?;
        } else {
            let bytes = reader.bytes(&self.socket, len)?;
            self.keep(owner, start, EarlyData::Bytes(bytes));
        }
        if is_last { self.finish(cookie, None, own) } else { Ok(AfterReply::GoOn) }
    }

    /// Fills the place of a hole with zeros, or decides that another thread does.
    fn hole(
        &self,
        reader: &mut ReplyReader,
        cookie: u64,
        is_last: bool,
        own: u64,
        transfer: &mut Transfer<'_, '_>,
    ) -> Result<AfterReply, String> {
        if let Some(other) = self.waiting_owner(cookie, own)? {
            return Ok(AfterReply::HandTo(other));
        }
        let payload = reader.bytes(&self.socket, 12)?;
        let mut fields = BigEndianFields(&payload);
        let (Some(offset), Some(len)) = (fields.u64(), fields.u32()) else {
            return Err("a hole is too short".to_owned());
        };
        let (owner, start) = self.arrived(cookie, Some(offset), len)?;
        let zeros = EarlyData::Zeros(as_len(len));
        match transfer {
            Transfer::Read(bufs) if owner == own => put(bufs, start, &zeros),
            _ => self.keep(owner, start, zeros),
        }
        if is_last { self.finish(cookie, None, own) } else { Ok(AfterReply::GoOn) }
    }

    /// Reads the status of ranges. They are few, so any thread keeps them for their operation.
    fn status(&self, reader: &mut ReplyReader, cookie: u64, len: u32) -> Result<(), String> {
        let wrong = || "the server tells the status of ranges in a wrong way".to_owned();
        if !(12..=STATUS_LEN_MAX).contains(&len) || self.allocation.is_none() {
            return Err(wrong());
        }
        let payload = reader.bytes(&self.socket, as_len(len))?;
        let mut fields = BigEndianFields(&payload);
        if fields.u32() != self.allocation {
            return Err(wrong());
        }
        let ranges: Vec<(u32, bool)> = std::iter::from_fn(|| fields.u32().zip(fields.u32()))
            .map(|(len, flags)| (len, flags & wire::STATE_ZERO != 0))
            .collect();
        if !fields.0.is_empty() || ranges.iter().any(|(len, _)| *len == 0) {
            return Err(wrong());
        }
        let mut state = self.state.lock();
        let request = state.requests.get(&cookie).filter(|request| request.piece.command == CommandCode::BlockStatus);
        let operation = request.ok_or(NO_REQUEST)?.operation;
        let Some(operation) = state.operations.get_mut(&operation) else { return Ok(()) };
        if !operation.status.is_empty() {
            return Err(wrong());
        }
        operation.status = ranges;
        Ok(())
    }

    /// The operation of a read's request, if it is not the own one and its thread waits (C1).
    fn waiting_owner(&self, cookie: u64, own: u64) -> Result<Option<u64>, String> {
        let state = self.state.lock();
        let request = state.requests.get(&cookie).filter(|request| request.is_read()).ok_or(NO_READ)?;
        let is_waiting = state.operations.get(&request.operation).is_some_and(|operation| operation.is_waiting);
        Ok(Some(request.operation).filter(|owner| *owner != own && is_waiting))
    }

    /// Notes `len` bytes that arrive for a read. `offset` is their place in the export; `None` means all bytes of the
    /// request. Returns the operation and the place in its buffers.
    fn arrived(&self, cookie: u64, offset: Option<u64>, len: u32) -> Result<(u64, usize), String> {
        let found = self.look_up(cookie, |request| {
            let piece = request.piece;
            let at = u32::try_from(offset.unwrap_or(piece.offset).checked_sub(piece.offset)?).ok()?;
            let end = at.checked_add(len).filter(|end| *end <= piece.len && request.is_read())?;
            let start = piece.start.checked_add(as_len(at))?;
            request.received.add(at, end).then_some((request.operation, start))
        })?;
        found.ok_or_else(|| "the server sends data that was not asked for, or twice".to_owned())
    }

    /// Keeps data for an operation whose thread is sending (C1).
    fn keep(&self, owner: u64, start: usize, data: EarlyData) {
        if let Some(operation) = self.state.lock().operations.get_mut(&owner) {
            operation.early.push((start, data));
        }
    }

    fn look_up<T>(&self, cookie: u64, take: impl FnOnce(&mut Request) -> T) -> Result<T, String> {
        let mut state = self.state.lock();
        state.requests.get_mut(&cookie).map(take).ok_or_else(|| NO_REQUEST.to_owned())
    }

    /// Ends a request after its last reply.
    fn finish(&self, cookie: u64, error: Option<ServerError>, own: u64) -> Result<AfterReply, String> {
        let mut state = self.state.lock();
        let request = state.requests.remove(&cookie).ok_or(NO_REQUEST)?;
        let error = request.error.clone().or(error);
        if request.is_read() && error.is_none() && !request.received.is_all_of(request.piece.len) {
            return Err("the server's reply to a read lacks bytes".to_owned());
        }
        let Some(operation) = state.operations.get_mut(&request.operation) else { return Ok(AfterReply::GoOn) };
        let lacks_status = request.piece.command == CommandCode::BlockStatus && operation.status.is_empty();
        if lacks_status && error.is_none() {
            return Err("the server's reply lacks the status of ranges".to_owned());
        }
        operation.nr_pending = operation.nr_pending.saturating_sub(1);
        operation.error = operation.error.take().or(error);
        if operation.nr_pending > 0 {
            return Ok(AfterReply::GoOn);
        }
        if request.operation == own {
            return Ok(AfterReply::Done);
        }
        operation.wake.notify_one();
        Ok(AfterReply::GoOn)
    }

    /// Ends the connection (C3). Only the first reason counts.
    fn lose(&self, why: &str) {
        let mut state = self.state.lock();
        if state.lost.is_none() {
            state.lost = Some(why.into());
        }
        self.socket.shut_down();
        state.operations.values().for_each(|operation| {
            operation.wake.notify_all();
        });
    }

    /// Whether the connection is lost.
    pub(crate) fn is_lost(&self) -> bool {
        self.state.lock().lost.is_some()
    }
}

impl Drop for SharedConnection {
    fn drop(&mut self) {
        if self.state.get_mut().lost.is_none() {
            // The server then knows that the client is done. Errors are ignored, because nothing depends on it.
            let _ = self.socket.send_all(&wire::request(CommandCode::Disconnect, false, 0, 0, 0));
            self.socket.close();
        }
    }
}

/// Data that arrives for a request.
struct ArrivingData {
    cookie: u64,
    len: u32,
    /// Whether the data starts with its offset.
    has_offset: bool,
    /// Whether no other reply to the request follows.
    is_last: bool,
}

/// The error in the payload of a chunk.
fn server_error(payload: &[u8]) -> Option<ServerError> {
    let mut fields = BigEndianFields(payload);
    let number = fields.u32().filter(|number| *number != 0)?;
    let text = fields.u16().and_then(|len| fields.bytes(usize::from(len))).unwrap_or_default();
    let text = escaped(text.get(..text.len().min(TEXT_MAX)).unwrap_or_default());
    Some(ServerError { number, text: text.into() })
}

/// The result of an operation after its last reply. Copies what arrived early into the buffers.
fn finished(operation: PendingOperation, transfer: &mut Transfer<'_, '_>) -> Result<(), RequestError> {
    if let Some(error) = operation.error {
        return Err(RequestError::Server(error));
    }
    match transfer {
        Transfer::Read(bufs) => operation.early.iter().for_each(|(start, data)| put(bufs, *start, data)),
        Transfer::Status(ranges) => **ranges = operation.status,
        Transfer::Write(_) | Transfer::Nothing => {}
    }
    Ok(())
}

/// Copies data to its place in buffers.
fn put(bufs: &mut [IoSliceMut<'_>], start: usize, data: &EarlyData) {
    match data {
        EarlyData::Bytes(bytes) => {
            copy_to(&mut part_mut(bufs, start, start.saturating_add(bytes.len())), bytes);
        }
        EarlyData::Zeros(len) => {
            part_mut(bufs, start, start.saturating_add(*len)).iter_mut().for_each(|buf| buf.fill(0))
        }
    }
}

const SILENT: &str = "the server does not answer in time";
const SILENT_IN_REPLY: &str = "the server does not complete a reply in time";
const NO_REQUEST: &str = "the server answers a request that was not sent";
const NO_READ: &str = "the server sends data for a request that is no read";
/// Bytes of the status of ranges at most: 8191 ranges.
const STATUS_LEN_MAX: u32 = 1 << 16;
/// Bytes of an error's payload at most.
const ERROR_LEN_MAX: u32 = 1 << 16;
/// Bytes of a server's text in an error.
pub(crate) const TEXT_MAX: usize = 200;
/// An operation may take this many times as long as the server may send nothing, and a server with a flush may send nothing
/// for that time.
const SLOW: u32 = 10;

fn as_len(len: u32) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

/// Reads replies from a socket. Bytes that arrive behind a reply wait in a buffer.
#[derive(Debug)]
struct ReplyReader {
    buf: Box<[u8]>,
    /// The bytes of `buf` that wait.
    start: usize,
    end: usize,
    /// The time after which the connection counts as lost, although bytes arrive.
    until: Option<Instant>,
}

impl Default for ReplyReader {
    fn default() -> Self {
        Self { buf: vec![0; READ_AHEAD].into_boxed_slice(), start: 0, end: 0, until: None }
    }
}

/// Bytes that are read behind a reply at most.
const READ_AHEAD: usize = 4096;
/// Bytes that are allocated before they arrive.
const STEP: usize = 1 << 16;

impl ReplyReader {
    /// Reads the header of the next reply.
    fn header(&mut self, socket: &Socket) -> Result<ReplyHeader, String> {
        const _: () = assert!(wire::HEADER_LEN_MAX <= READ_AHEAD);
        loop {
            match wire::reply_header(self.waiting()) {
                Ok(Some((header, len))) => {
                    self.start = self.start.saturating_add(len);
                    return Ok(header);
                }
                Ok(None) => {}
                Err(magic) => return Err(format!("the server sends no reply but {magic:#010x}")),
            }
            let (start, end) = (self.start, self.end);
            self.buf.copy_within(start..end, 0);
            (self.start, self.end) = (0, end.saturating_sub(start));
            let rest = self.buf.get_mut(self.end..).unwrap_or_default();
            let read = receive(socket, self.until, &mut [IoSliceMut::new(rest)])?;
            self.end = self.end.saturating_add(read);
        }
    }

    fn waiting(&self) -> &[u8] {
        self.buf.get(self.start..self.end).unwrap_or_default()
    }

    /// Fills all buffers.
    fn data(&mut self, socket: &Socket, mut bufs: &mut [IoSliceMut<'_>]) -> Result<(), String> {
        let copied = copy_to(bufs, self.buf.get(self.start..self.end).unwrap_or_default());
        self.start = self.start.saturating_add(copied);
        IoSliceMut::advance_slices(&mut bufs, copied);
        while !bufs.is_empty() {
            // All that waited is copied, so the buffer is free.
            (self.start, self.end) = (0, 0);
            let (nr_bufs, nr_all) = (bufs.len().min(NR_BUFS_MAX.saturating_sub(1)), bufs.len());
            let now = bufs.get_mut(..nr_bufs).unwrap_or_default();
            let wanted: usize = now.iter().map(|buf| buf.len()).sum();
            let mut list: Vec<IoSliceMut<'_>> = now.iter_mut().map(|buf| IoSliceMut::new(buf)).collect();
            if nr_bufs == nr_all {
                list.push(IoSliceMut::new(&mut self.buf));
            }
            let read = receive(socket, self.until, &mut list)?;
            self.end = read.saturating_sub(wanted);
            IoSliceMut::advance_slices(&mut bufs, read.min(wanted));
        }
        Ok(())
    }

    /// Reads `len` bytes. Memory grows as they arrive (I1 of the crate).
    fn bytes(&mut self, socket: &Socket, len: usize) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        while bytes.len() < len {
            let old = bytes.len();
            bytes.resize(old.saturating_add(STEP).min(len), 0);
            self.data(socket, &mut [IoSliceMut::new(bytes.get_mut(old..).unwrap_or_default())])?;
        }
        Ok(bytes)
    }

    /// Reads a number of eight bytes.
    fn number(&mut self, socket: &Socket) -> Result<u64, String> {
        let mut bytes = [0; 8];
        self.data(socket, &mut [IoSliceMut::new(&mut bytes)])?;
        Ok(u64::from_be_bytes(bytes))
    }
}

/// Reads what has arrived. Fails at the end of the stream, or if time is over.
fn receive(socket: &Socket, until: Option<Instant>, bufs: &mut [IoSliceMut<'_>]) -> Result<usize, String> {
    match socket.receive(bufs) {
        Ok(0) => Err("the server closed the connection".to_owned()),
        Ok(_) if until.is_some_and(|until| Instant::now() > until) => Err("the server is too slow".to_owned()),
        Ok(read) => Ok(read),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(SILENT.to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
