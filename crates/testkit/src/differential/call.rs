//! System calls as data: the call of each step and the user that makes it. A step is one line of JSON, so that a
//! failing sequence can be kept in a file.
//!
//! Names are byte strings, stored as text in which the character U+00NN stands for byte NN.

use serde::{Deserialize, Serialize};

use crate::Rng;

/// A call and the user that makes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    /// Index into [`super::ACTORS`].
    pub user: usize,
    /// The call.
    pub call: Call,
}

/// The type of inode to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names of the POSIX file types")]
pub enum Kind {
    File,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

/// The `whence` argument of lseek.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the words of lseek(2)")]
pub enum Seek {
    Set,
    Current,
    End,
    Data,
    Hole,
}

/// A time for utimensat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Time {
    /// `UTIME_NOW`.
    Now,
    /// `UTIME_OMIT`.
    Omit,
    /// Seconds and nanoseconds. A given time is far from the present, so that it differs from the time of any call.
    At(i64, u32),
}

/// Bytes generated from a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Content {
    /// Different seeds give different bytes.
    pub seed: u64,
    /// The number of bytes.
    pub len: usize,
}

impl Content {
    /// Generates the bytes.
    pub fn bytes(&self) -> Vec<u8> {
        Rng::new(self.seed).content(self.len)
    }
}

/// A system call, or an event of the whole pair. Paths are relative to the mount point, and `slot` is the number of a
/// place for an open file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the arguments of the system calls of these names")]
pub enum Call {
    Open {
        slot: usize,
        path: String,
        flags: u32,
        mode: u32,
    },
    Close {
        slot: usize,
    },
    Read {
        slot: usize,
        len: usize,
    },
    Pread {
        slot: usize,
        at: u64,
        len: usize,
    },
    Write {
        slot: usize,
        data: Content,
    },
    Pwrite {
        slot: usize,
        at: u64,
        data: Content,
    },
    Lseek {
        slot: usize,
        whence: Seek,
        at: i64,
    },
    Ftruncate {
        slot: usize,
        len: u64,
    },
    Fallocate {
        slot: usize,
        mode: u32,
        at: u64,
        len: u64,
    },
    CopyFileRange {
        from: usize,
        from_at: u64,
        to: usize,
        to_at: u64,
        len: usize,
    },
    Fsync {
        slot: usize,
        data_only: bool,
    },
    Fchmod {
        slot: usize,
        mode: u32,
    },
    Fchown {
        slot: usize,
        uid: Option<u32>,
        gid: Option<u32>,
    },
    Flock {
        slot: usize,
        exclusive: Option<bool>,
    },
    Getdents {
        slot: usize,
        entries: usize,
    },
    Rewind {
        slot: usize,
    },
    Truncate {
        path: String,
        len: u64,
    },
    Mkdir {
        path: String,
        mode: u32,
    },
    Mknod {
        path: String,
        kind: Kind,
        mode: u32,
        major: u32,
        minor: u32,
    },
    Symlink {
        path: String,
        target: String,
    },
    Link {
        from: String,
        to: String,
        follow: bool,
    },
    LinkSlot {
        slot: usize,
        to: String,
    },
    Readlink {
        path: String,
    },
    Unlink {
        path: String,
    },
    Rmdir {
        path: String,
    },
    Rename {
        from: String,
        to: String,
        flags: u32,
    },
    Chmod {
        path: String,
        mode: u32,
    },
    Chown {
        path: String,
        uid: Option<u32>,
        gid: Option<u32>,
        follow: bool,
    },
    Utimens {
        path: String,
        atime: Time,
        mtime: Time,
        follow: bool,
    },
    Setxattr {
        path: String,
        name: String,
        value: Content,
        flags: u32,
    },
    SetAcl {
        path: String,
        default: bool,
        acl: Vec<(u16, u16, u32)>,
    },
    SetProperty {
        path: String,
        value: String,
    },
    Getxattr {
        path: String,
        name: String,
    },
    Removexattr {
        path: String,
        name: String,
    },
    Listxattr {
        path: String,
    },
    GetFlags {
        path: String,
    },
    SetFlags {
        path: String,
        flags: u32,
    },
    Stat {
        path: String,
        follow: bool,
    },
    Access {
        path: String,
        mode: u32,
        effective: bool,
    },
    Readdir {
        path: String,
    },
    /// Maps the start of the file that is open in `slot` into memory, at most `len` bytes of it. The mapping stays when
    /// the file in the slot is closed.
    Map {
        slot: usize,
        len: usize,
        write: bool,
    },
    MapStore {
        slot: usize,
        at: u64,
        data: Content,
    },
    MapLoad {
        slot: usize,
        at: u64,
        len: usize,
    },
    MapSync {
        slot: usize,
    },
    Unmap {
        slot: usize,
    },
    SubvolCreate {
        path: String,
    },
    SubvolDelete {
        path: String,
    },
    SubvolSnapshot {
        from: String,
        to: String,
        read_only: bool,
    },
    SubvolGetFlags {
        path: String,
    },
    SubvolSetFlags {
        path: String,
        read_only: bool,
    },
    /// Runs several threads at once, each in a separate directory, with random calls from this seed.
    Together {
        seed: u64,
    },
    /// Sets the umask of all users for the following calls.
    Umask {
        mask: u32,
    },
    /// Calls syncfs, and runs `ubtrfs sync` on our side.
    Sync,
    /// Compares both whole trees.
    Compare,
    /// Unmounts and mounts both sides again. Each side's tree must be the same before and after, including all times.
    Remount,
    /// Makes the sides exchange their images: our side continues with the image that Linux wrote, and Linux continues
    /// with the image that ubtrfs wrote.
    Swap,
}

impl Call {
    /// Returns the name of the call, without its arguments.
    pub fn name(&self) -> String {
        let text = format!("{self:?}");
        text.split([' ', '{']).next().unwrap_or_default().to_owned()
    }

    /// Whether the call is about subvolumes.
    pub(crate) fn is_of_subvolumes(&self) -> bool {
        use Call::*;
        matches!(
            self,
            SubvolCreate { .. }
                | SubvolDelete { .. }
                | SubvolSnapshot { .. }
                | SubvolGetFlags { .. }
                | SubvolSetFlags { .. }
        )
    }

    /// Whether the call is about a mapping.
    pub(crate) fn is_of_mapping(&self) -> bool {
        use Call::*;
        matches!(self, Map { .. } | MapStore { .. } | MapLoad { .. } | MapSync { .. } | Unmap { .. })
    }

    /// The paths that the call names.
    pub fn paths(&self) -> Vec<&str> {
        use Call::*;
        match self {
            Open { path, .. }
            | Truncate { path, .. }
            | Mkdir { path, .. }
            | Mknod { path, .. }
            | Symlink { path, .. }
            | Readlink { path }
            | Unlink { path }
            | Rmdir { path }
            | Chmod { path, .. }
            | Chown { path, .. }
            | Utimens { path, .. }
            | Setxattr { path, .. }
            | SetAcl { path, .. }
            | SetProperty { path, .. }
            | Getxattr { path, .. }
            | Removexattr { path, .. }
            | Listxattr { path }
            | GetFlags { path }
            | SetFlags { path, .. }
            | Stat { path, .. }
            | Access { path, .. }
            | SubvolCreate { path }
            | SubvolDelete { path }
            | SubvolGetFlags { path }
            | SubvolSetFlags { path, .. }
            | Readdir { path } => vec![path],
            Link { from, to, .. } | Rename { from, to, .. } | SubvolSnapshot { from, to, .. } => vec![from, to],
            LinkSlot { to, .. } => vec![to],
            _ => Vec::new(),
        }
    }

    /// Returns the slots that the call names.
    pub fn slots(&self) -> Vec<usize> {
        use Call::*;
        match *self {
            Open { slot, .. }
            | Read { slot, .. }
            | Pread { slot, .. }
            | Write { slot, .. }
            | Pwrite { slot, .. }
            | Lseek { slot, .. }
            | Ftruncate { slot, .. }
            | Fallocate { slot, .. }
            | Fsync { slot, .. }
            | Fchmod { slot, .. }
            | Fchown { slot, .. }
            | Flock { slot, .. }
            | Getdents { slot, .. }
            | Rewind { slot }
            | Map { slot, .. }
            | MapStore { slot, .. }
            | MapLoad { slot, .. }
            | MapSync { slot }
            | Unmap { slot }
            | LinkSlot { slot, .. } => vec![slot],
            CopyFileRange { from, to, .. } => vec![from, to],
            _ => Vec::new(),
        }
    }
}

/// Converts the text of a name to bytes.
pub(crate) fn name_bytes(text: &str) -> Vec<u8> {
    text.chars().map(|char| u8::try_from(u32::from(char)).unwrap_or(b'?')).collect()
}

/// Converts bytes to the text of a name.
pub(crate) fn name_text(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| char::from(byte)).collect()
}
