//! The fixed newstyle handshake, with TLS if the URL asks for it.
//!
//! ```text
//! server  NBDMAGIC  IHAVEOPT  flags u16
//! client  flags u32
//! client  IHAVEOPT  option u32  length u32  data           once for each option
//! server  magic u64  option u32  type u32  length u32  data  one or several for each option
//! ```

use std::io::{self, IoSliceMut};
use std::time::{Duration, Instant};

use ubtrfs_format::print::escaped;

use crate::connection::TEXT_MAX;
use crate::dial::{Dialed, PlainSocket, Socket};
use crate::error::NbdError;
use crate::tls::{TlsClient, TlsSocket};
use crate::wire::{self, BigEndianFields, info, option, option_reply};

/// Properties of an export, as its server tells them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Size in bytes.
    pub size_bytes: u64,
    /// The abilities of the server.
    pub flags: ExportFlags,
    /// Offsets and lengths of requests are multiples of this many bytes, a power of 2.
    pub min_block: u32,
    /// Requests of this many bytes are fast.
    pub preferred_block: u32,
    /// Bytes that a read or a write may have at most.
    pub max_block: u32,
}

/// The transmission flags of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportFlags(pub(crate) u16);

impl ExportFlags {
    /// `NBD_FLAG_READ_ONLY`.
    pub fn is_read_only(self) -> bool {
        self.0 & (1 << 1) != 0
    }

    /// `NBD_FLAG_SEND_FLUSH`: the server can make writes durable.
    pub fn can_flush(self) -> bool {
        self.0 & (1 << 2) != 0
    }

    /// `NBD_FLAG_SEND_FUA`: the server takes writes that are durable when they are answered.
    pub fn can_write_durably(self) -> bool {
        self.0 & (1 << 3) != 0
    }

    /// `NBD_FLAG_SEND_TRIM`: the server takes discards.
    pub fn can_trim(self) -> bool {
        self.0 & (1 << 5) != 0
    }

    /// `NBD_FLAG_SEND_WRITE_ZEROES`: the server writes zeros that it does not get.
    pub fn can_write_zeroes(self) -> bool {
        self.0 & (1 << 6) != 0
    }

    /// `NBD_FLAG_CAN_MULTI_CONN`: a flush on one connection covers the writes of all connections.
    pub fn can_multi_conn(self) -> bool {
        self.0 & (1 << 8) != 0
    }
}

/// A socket after the handshake.
#[derive(Debug)]
pub(crate) struct Negotiated {
    pub(crate) socket: Socket,
    pub(crate) export: ExportInfo,
    /// Whether the server answers reads with structured replies.
    pub(crate) has_structured: bool,
    /// The server's number of the context [`wire::ALLOCATION`].
    pub(crate) allocation: Option<u32>,
}

/// Makes the handshake, which may take `patience` in all.
pub(crate) fn negotiate(dialed: Dialed, patience: Duration) -> Result<Negotiated, NbdError> {
    let Dialed { socket, url, tls, .. } = dialed;
    let export_name = url.export.clone();
    let until = Instant::now().checked_add(patience);
    let mut talk = Talk { socket: Socket::Plain(socket), server: url.to_string(), until };
    talk.greet()?;
    if let Some(client) = tls {
        talk = talk.start_tls(&client)?;
    }
    let has_structured = talk.ask_structured()?;
    let allocation = if has_structured { talk.ask_allocation(&export_name)? } else { None };
    let export = talk.go(&export_name)?;
    Ok(Negotiated { socket: talk.socket, export, has_structured, allocation })
}

/// The socket during the handshake.
struct Talk {
    socket: Socket,
    /// For messages.
    server: String,
    until: Option<Instant>,
}

/// A reply to an option.
struct OptionReply {
    kind: u32,
    data: Vec<u8>,
}

/// Bytes that a reply to an option may have at most.
const REPLY_DATA_MAX: u32 = 1 << 16;
/// Replies that an option may have at most, apart from the list of exports.
const NR_REPLIES_MAX: usize = 256;
/// Exports that an error names at most.
const NR_LISTED_MAX: usize = 8;
/// Bytes that a read or write has at most if the server does not tell the limit.
const MAX_BLOCK: u32 = 32 << 20;
/// The smallest block of an export that btrfs can use.
const MIN_BLOCK_MAX: u32 = 4096;

impl Talk {
    fn greet(&mut self) -> Result<(), NbdError> {
        let magics: [u8; 16] = self.read()?;
        let mut fields = BigEndianFields(&magics);
        let [server, style] = [fields.u64(), fields.u64()];
        match style {
            _ if server != Some(wire::SERVER_MAGIC) => return Err(NbdError::NotNbd { server: self.server.clone() }),
            Some(wire::OPTION_MAGIC) => {}
            Some(wire::OLD_MAGIC) => return Err(NbdError::Old { server: self.server.clone() }),
            _ => return Err(NbdError::NotNbd { server: self.server.clone() }),
        }
        let flags = u16::from_be_bytes(self.read()?);
        if flags & wire::FIXED_NEWSTYLE == 0 {
            return Err(NbdError::Old { server: self.server.clone() });
        }
        self.write(&u32::from(flags & (wire::FIXED_NEWSTYLE | wire::NO_ZEROES)).to_be_bytes())
    }

    /// Goes on with TLS. Nothing that the server said before counts, except for its greeting.
    fn start_tls(mut self, client: &TlsClient) -> Result<Self, NbdError> {
        self.send_option(option::STARTTLS, &[])?;
        match self.reply(option::STARTTLS)?.kind {
            option_reply::ACK => {}
            kind if kind & option_reply::ERROR != 0 => return Err(NbdError::NoTls { server: self.server }),
            _ => return Err(self.broken("it answers an option with a reply of another kind")),
        }
        let Self { socket, server, until } = self;
        let Socket::Plain(plain) = socket else { return Err(NbdError::NoTls { server }) };
        let before_wait = |plain: &PlainSocket| match left(until) {
            Some(left) => plain.set_patience(left),
            None => Err(io::ErrorKind::WouldBlock.into()),
        };
        match TlsSocket::negotiate(plain, client, before_wait) {
            Ok(socket) => Ok(Self { socket: Socket::Tls(Box::new(socket)), server, until }),
            Err(error) => Err(failure(server, error)),
        }
    }

    /// Asks for structured replies. Returns whether the server makes them.
    fn ask_structured(&mut self) -> Result<bool, NbdError> {
        self.send_option(option::STRUCTURED_REPLY, &[])?;
        match self.reply(option::STRUCTURED_REPLY)?.kind {
            option_reply::ACK => Ok(true),
            option_reply::ERR_TLS_REQD => Err(NbdError::TlsRequired { server: self.server.clone() }),
            kind if kind & option_reply::ERROR != 0 => Ok(false),
            _ => Err(self.broken("it answers an option with a reply of another kind")),
        }
    }

    /// Asks for the context that tells which ranges read as zeros. Returns its number, if the server has it.
    fn ask_allocation(&mut self, name: &[u8]) -> Result<Option<u32>, NbdError> {
        let text = |text: &[u8]| [&u32::try_from(text.len()).unwrap_or(u32::MAX).to_be_bytes()[..], text].concat();
        let data = [text(name), 1u32.to_be_bytes().to_vec(), text(wire::ALLOCATION)].concat();
        self.send_option(option::SET_META_CONTEXT, &data)?;
        let mut found = None;
        for _ in 0..NR_REPLIES_MAX {
            let OptionReply { kind, data } = self.reply(option::SET_META_CONTEXT)?;
            match kind {
                option_reply::ACK => return Ok(found),
                option_reply::META_CONTEXT => {
                    let mut fields = BigEndianFields(&data);
                    let number = fields.u32();
                    found = found.or(number.filter(|_| fields.0 == wire::ALLOCATION));
                }
                // If something is wrong with the export, opening it says what.
                kind if kind & option_reply::ERROR != 0 => return Ok(None),
                _ => {}
            }
        }
        Err(self.broken("it answers an option with too many replies"))
    }

    /// Opens the export.
    fn go(&mut self, name: &[u8]) -> Result<ExportInfo, NbdError> {
        let len = u32::try_from(name.len()).unwrap_or(u32::MAX);
        let data = [&len.to_be_bytes()[..], name, &1u16.to_be_bytes(), &info::BLOCK_SIZE.to_be_bytes()].concat();
        self.send_option(option::GO, &data)?;
        let (mut found, mut blocks) = (None, None);
        for _ in 0..NR_REPLIES_MAX {
            let OptionReply { kind, data } = self.reply(option::GO)?;
            let mut fields = BigEndianFields(&data);
            match kind {
                option_reply::ACK => {
                    let (size_bytes, flags) =
                        found.ok_or_else(|| self.broken("it opens an export without telling its size"))?;
                    return self.export(size_bytes, ExportFlags(flags), blocks);
                }
                option_reply::INFO => match fields.u16() {
                    Some(info::EXPORT) => found = fields.u64().zip(fields.u16()),
                    Some(info::BLOCK_SIZE) => blocks = fields.u32().zip(fields.u32()).zip(fields.u32()),
                    _ => {}
                },
                kind if kind & option_reply::ERROR != 0 => return Err(self.refused(kind, name, &data)),
                _ => {}
            }
        }
        Err(self.broken("it answers an option with too many replies"))
    }

    /// Checks the properties of an export.
    fn export(
        &self,
        size_bytes: u64,
        flags: ExportFlags,
        blocks: Option<((u32, u32), u32)>,
    ) -> Result<ExportInfo, NbdError> {
        let ((min_block, preferred_block), max_block) = blocks.unwrap_or(((1, 4096), MAX_BLOCK));
        let is_sane = min_block.is_power_of_two() && preferred_block.is_power_of_two() && max_block >= min_block;
        if !is_sane {
            return Err(self.broken("its block sizes contradict each other"));
        }
        if min_block > MIN_BLOCK_MAX || max_block < MIN_BLOCK_MAX {
            return Err(NbdError::BlockSize { server: self.server.clone(), min_block });
        }
        if i64::try_from(size_bytes).is_err() {
            return Err(self.broken("its export has an impossible size"));
        }
        // A whole number of blocks of 4096 bytes.
        let max_block = max_block.min(MAX_BLOCK) & !MIN_BLOCK_MAX.saturating_sub(1);
        Ok(ExportInfo { size_bytes, flags, min_block, preferred_block, max_block })
    }

    /// The error for an export that the server does not open.
    fn refused(&mut self, kind: u32, name: &[u8], text: &[u8]) -> NbdError {
        let (server, export) = (self.server.clone(), escaped(name));
        match kind {
            option_reply::ERR_UNSUP => NbdError::Old { server },
            option_reply::ERR_TLS_REQD => NbdError::TlsRequired { server },
            option_reply::ERR_UNKNOWN => NbdError::UnknownExport { server, export, exports: self.exports() },
            option_reply::ERR_BLOCK_SIZE_REQD => NbdError::Refused { server, export, reason: String::new() },
            _ => {
                let text = escaped(text.get(..text.len().min(TEXT_MAX)).unwrap_or_default());
                let reason = match kind {
                    _ if !text.is_empty() => format!(": {text}"),
                    option_reply::ERR_POLICY => ": its policy forbids it".to_owned(),
                    option_reply::ERR_SHUTDOWN => ": it shuts down".to_owned(),
                    _ => String::new(),
                };
                NbdError::Refused { server, export, reason }
            }
        }
    }

    /// The names of the server's exports, as a part of a message. Empty if the server does not tell them.
    fn exports(&mut self) -> String {
        let mut names = Vec::new();
        if self.send_option(option::LIST, &[]).is_ok() {
            while names.len() <= NR_LISTED_MAX {
                let Ok(OptionReply { kind: option_reply::SERVER, data }) = self.reply(option::LIST) else { break };
                let mut fields = BigEndianFields(&data);
                let name = fields.u32().and_then(|len| fields.bytes(usize::try_from(len).ok()?));
                names.extend(name.map(|name| format!("'{}'", escaped(name.get(..TEXT_MAX).unwrap_or(name)))));
            }
        }
        let _ = self.send_option(option::ABORT, &[]);
        if names.len() > NR_LISTED_MAX {
            names.truncate(NR_LISTED_MAX);
            names.push("others".to_owned());
        }
        if names.is_empty() { String::new() } else { format!(", but {}", names.join(", ")) }
    }

    fn send_option(&mut self, option: u32, data: &[u8]) -> Result<(), NbdError> {
        let len = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let head = [&wire::OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &len.to_be_bytes(), data].concat();
        self.write(&head)
    }

    /// Reads a reply to an option.
    fn reply(&mut self, option: u32) -> Result<OptionReply, NbdError> {
        let head: [u8; 20] = self.read()?;
        let mut fields = BigEndianFields(&head);
        let is_reply = fields.u64() == Some(wire::OPTION_REPLY_MAGIC) && fields.u32() == Some(option);
        let (Some(kind), Some(len), true) = (fields.u32(), fields.u32(), is_reply) else {
            return Err(self.broken("it answers another option than the one that was sent"));
        };
        let len = usize::try_from(len).ok().filter(|_| len <= REPLY_DATA_MAX);
        let mut data = vec![0; len.ok_or_else(|| self.broken("it answers an option with too many bytes"))?];
        self.fill(&mut data)?;
        Ok(OptionReply { kind, data })
    }

    fn read<const N: usize>(&mut self) -> Result<[u8; N], NbdError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes).map(|()| bytes)
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), NbdError> {
        let mut done = 0usize;
        while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
            self.set_patience()?;
            match self.socket.receive(&mut [IoSliceMut::new(rest)]) {
                Ok(0) => return Err(NbdError::Closed { server: self.server.clone() }),
                Ok(read) => done = done.saturating_add(read),
                Err(error) => return Err(self.failed(error)),
            }
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), NbdError> {
        self.set_patience()?;
        self.socket.send_all(bytes).map_err(|error| self.failed(error))
    }

    /// Sets the limit of the next wait to what is left of the handshake's time.
    fn set_patience(&self) -> Result<(), NbdError> {
        let left = left(self.until).ok_or_else(|| NbdError::Silent { server: self.server.clone() })?;
        self.socket.set_patience(left).map_err(|source| NbdError::Io { server: self.server.clone(), source })
    }

    fn failed(&self, source: io::Error) -> NbdError {
        failure(self.server.clone(), source)
    }

    fn broken(&self, what: &'static str) -> NbdError {
        NbdError::Protocol { server: self.server.clone(), what }
    }
}

/// The rest of the handshake's time.
fn left(until: Option<Instant>) -> Option<Duration> {
    until.map(|until| until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
}

/// The error for a failure of the socket.
fn failure(server: String, source: io::Error) -> NbdError {
    match source.kind() {
        io::ErrorKind::WouldBlock => NbdError::Silent { server },
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => NbdError::Closed { server },
        io::ErrorKind::InvalidData => NbdError::Tls { server, why: source.to_string() },
        _ => NbdError::Io { server, source },
    }
}
