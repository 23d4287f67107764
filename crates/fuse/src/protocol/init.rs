//! The INIT exchange: the kernel offers features, and the server chooses.

use std::io;

use bitflags::bitflags;
use zerocopy::{FromBytes, IntoBytes};

use super::wire::{InHeader, InitIn, InitOut, OutHeader, opcode};

bitflags! {
    /// Features of the protocol beyond its first version.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u64 {
        /// Several reads of a file run at once.
        const ASYNC_READ = 1 << 0;
        /// A request to open a file with O_TRUNC also truncates the file.
        const ATOMIC_O_TRUNC = 1 << 3;
        /// The kernel may look up "." and "..".
        const EXPORT_SUPPORT = 1 << 4;
        /// The kernel sends writes larger than a page.
        const BIG_WRITES = 1 << 5;
        /// The server applies the umask.
        const DONT_MASK = 1 << 6;
        /// The kernel sends ioctls on directories.
        const HAS_IOCTL_DIR = 1 << 11;
        /// The kernel reads directories together with the entries' attributes.
        const DO_READDIRPLUS = 1 << 13;
        /// The kernel decides when to read directories with attributes.
        const READDIRPLUS_AUTO = 1 << 14;
        /// The kernel collects small writes.
        const WRITEBACK_CACHE = 1 << 16;
        /// Several lookups in a directory run at once.
        const PARALLEL_DIROPS = 1 << 18;
        /// The kernel enforces ACLs.
        const POSIX_ACL = 1 << 20;
        /// The kernel sends requests larger than 128 KiB.
        const MAX_PAGES = 1 << 22;
        /// The kernel caches the targets of symbolic links.
        const CACHE_SYMLINKS = 1 << 23;
        /// The server clears set-user-id of files that change, which saves a getxattr for every write.
        const HANDLE_KILLPRIV_V2 = 1 << 28;
        /// The kernel and the server exchange more than 32 feature bits.
        const INIT_EXT = 1 << 30;
        /// The mount can be mounted again with mapped owners (idmapped mounts). The kernel then tells the caller's user
        /// and group only in requests that make inodes; all other requests have [`UNKNOWN_ID`] in their place.
        const ALLOW_IDMAP = 1 << 40;
        /// The kernel sends requests through rings of io_uring.
        const OVER_IO_URING = 1 << 41;
    }
}

/// The user and group of requests whose callers the kernel does not tell ([`Features::ALLOW_IDMAP`]).
pub(crate) const UNKNOWN_ID: u32 = u32::MAX;

/// Limits that the server announces.
#[derive(Clone, Copy, Debug)]
pub struct InitLimits {
    /// Largest write request in bytes; reads are as large.
    pub max_write: u32,
    /// Background requests (read-ahead, writeback) that the kernel keeps in flight.
    pub max_background: u16,
}

/// The kernel's INIT request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    unique: u64,
    pub(crate) major: u32,
    minor: u32,
    max_readahead: u32,
    pub(crate) features: Features,
}

impl Offer {
    /// Reads the kernel's first request.
    pub(crate) fn decode(bytes: &[u8]) -> io::Result<Self> {
        let wrong = |what: &'static str| io::Error::new(io::ErrorKind::InvalidData, what);
        let (header, body) = InHeader::read_from_prefix(bytes).map_err(|_| wrong("a FUSE request without a header"))?;
        if header.opcode != opcode::INIT {
            return Err(wrong("the first FUSE request is not INIT"));
        }
        // Older kernels send fewer fields; the missing ones are zero.
        let mut init = InitIn::default();
        let len = body.len().min(size_of::<InitIn>());
        init.as_mut_bytes()[..len].copy_from_slice(&body[..len]);
        if init.major < MAJOR || init.major == MAJOR && init.minor < MINOR_MIN {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "this kernel's FUSE is older than 7.23 (Linux 3.15)",
            ));
        }
        let mut features = Features::from_bits_truncate(u64::from(init.flags));
        if features.contains(Features::INIT_EXT) {
            features |= Features::from_bits_truncate(u64::from(init.flags2) << 32);
        }
        let unique = header.unique;
        Ok(Self { unique, major: init.major, minor: init.minor, max_readahead: init.max_readahead, features })
    }
}

/// Makes the answer: the features of `wanted` that the kernel offered. A kernel with a later major version gets an
/// answer that contains only the server's version, and then sends INIT again.
pub(crate) fn answer_init(offer: &Offer, wanted: Features, limits: InitLimits) -> Vec<u8> {
    let features = if offer.major == MAJOR { offer.features & wanted } else { Features::empty() };
    let [low, high] = [features.bits(), features.bits() >> 32].map(|bits| u32::try_from(bits & u64::from(u32::MAX)));
    let init = InitOut {
        major: MAJOR,
        minor: offer.minor.min(MINOR),
        max_readahead: offer.max_readahead,
        flags: low.unwrap_or_default(),
        max_background: limits.max_background,
        congestion_threshold: limits.max_background / 4 * 3,
        max_write: limits.max_write,
        time_gran: 1,
        max_pages: u16::try_from(limits.max_write.div_ceil(4096)).unwrap_or(u16::MAX),
        flags2: high.unwrap_or_default(),
        ..InitOut::default()
    };
    let len = u32::try_from(size_of::<OutHeader>() + size_of::<InitOut>()).unwrap_or_default();
    let header = OutHeader { len, error: 0, unique: offer.unique };
    [header.as_bytes(), init.as_bytes()].concat()
}

/// Major version of the protocol that this server speaks.
pub(crate) const MAJOR: u32 = 7;
/// Newest minor version that this server speaks.
const MINOR: u32 = 45;
/// Oldest minor version that this server understands.
const MINOR_MIN: u32 = 23;

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(major: u32, minor: u32, flags: u32, flags2: u32) -> io::Result<Offer> {
        let header = InHeader { opcode: opcode::INIT, unique: 9, ..InHeader::default() };
        let init = InitIn { major, minor, max_readahead: 4096, flags, flags2, ..InitIn::default() };
        Offer::decode(&[header.as_bytes(), init.as_bytes()].concat())
    }

    #[test]
    fn only_offered_features_are_requested() {
        let limits = InitLimits { max_write: 1 << 20, max_background: 64 };
        let offer = offer(7, 45, 1 | 1 << 30 | 1 << 18, 1 << 9).unwrap();
        let answer = answer_init(&offer, Features::all(), limits);
        let (header, body) = OutHeader::read_from_prefix(&answer).unwrap();
        let (init, _) = InitOut::read_from_prefix(body).unwrap();
        assert_eq!((header.len, header.error, header.unique), (80, 0, 9));
        assert_eq!((init.flags, init.flags2), (1 | 1 << 30 | 1 << 18, 1 << 9));
        assert_eq!((init.max_pages, init.max_write, init.congestion_threshold), (256, 1 << 20, 48));
    }

    #[test]
    fn features_beyond_32_need_the_kernels_word_and_old_kernels_are_refused() {
        assert!(!offer(7, 45, 1, 1 << 9).unwrap().features.contains(Features::OVER_IO_URING));
        assert!(offer(7, 22, 1, 0).is_err());
        assert!(offer(8, 0, 1, 0).unwrap().major > MAJOR);
        assert!(Offer::decode(&[0; 10]).is_err());
    }
}
