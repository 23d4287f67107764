//! The control socket of an image that a process has open without a mount, such as a balance in the background.
//!
//! - P1. The socket's name starts with the identity of the image and the work that is done on it. Clients find it in
//!   /proc/net/unix, so the name also has a random part, and nobody else can take it first.
//! - P2. A client sends its descriptor of the image. So it connects only to servers of root or of its own user.
//! - P3. The server obeys the clients that a mount of the same user would obey: root and that user. They must send a
//!   descriptor of the image, open for writing if the command changes something.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Weak};

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_fs::{Fs, InodeId};

use crate::execute::{Host, OpenFile};
use crate::failure::{CommandFailure, Result};
use crate::mount_file::{MountFile, open_image_to_send};
use crate::peer::Peers;

/// The identity of an image file or block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageId {
    is_device: bool,
    /// `st_dev` of a file, `st_rdev` of a block device.
    device: u64,
    /// `st_ino` of a file, 0 for a block device.
    ino: u64,
}

impl ImageId {
    /// The identity of an open image.
    ///
    /// # Errors
    /// The status of the file cannot be read.
    pub fn of(file: impl AsFd) -> io::Result<Self> {
        let stat = fstat(file)?;
        Ok(match FileType::from_raw_mode(stat.st_mode) {
            FileType::BlockDevice => Self { is_device: true, device: stat.st_rdev, ino: 0 },
            _ => Self { is_device: false, device: stat.st_dev, ino: stat.st_ino },
        })
    }

    /// What tells images apart, as [`ubtrfs_device::FileDevice::place`] has it.
    pub(crate) fn place(self) -> (bool, u64, u64) {
        (self.is_device, self.device, self.ino)
    }

    /// Whether this is a file of the filesystem with this `st_dev`.
    pub fn is_file_of(self, filesystem: u64) -> bool {
        !self.is_device && self.device == filesystem
    }

    /// The start of the names of sockets for this image (P1).
    pub(crate) fn socket_prefix(self) -> String {
        let kind = if self.is_device { "device" } else { "file" };
        format!("ubtrfs-{kind}-{:x}-{:x}-", self.device, self.ino)
    }
}

/// The work for which a process has an image open and serves commands on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageWork {
    /// A balance.
    Balance,
    /// A change of a device's size.
    Resize,
    /// A removal of devices.
    Removal,
    /// A replacement of a device.
    Replacement,
    /// A scrub.
    Scrub,
}

impl ImageWork {
    /// The word in the names of sockets (P1).
    fn word(self) -> &'static str {
        match self {
            Self::Balance => "balance",
            Self::Resize => "resize",
            Self::Removal => "removal",
            Self::Replacement => "replacement",
            Self::Scrub => "scrub",
        }
    }

    /// The start of the names of sockets for this work on an image (P1).
    pub(crate) fn socket_prefix(self, image: ImageId) -> String {
        format!("{}{}-", image.socket_prefix(), self.word())
    }

    /// The work that the name of a socket tells.
    pub(crate) fn of_socket(name: &[u8]) -> Option<Self> {
        // `ubtrfs-file-DEVICE-INO-WORK-RANDOM`
        let word = name.split(|byte| *byte == b'-').nth(4)?;
        [Self::Balance, Self::Resize, Self::Removal, Self::Replacement, Self::Scrub]
            .into_iter()
            .find(|work| work.word().as_bytes() == word)
    }
}

/// The names of the sockets that serve an image, and the users whose sockets a client trusts.
pub(crate) struct Sockets {
    pub(crate) image: MountFile,
    pub(crate) names: Vec<Vec<u8>>,
    pub(crate) peers: Peers,
}

/// Finds the sockets of an image.
pub(crate) fn sockets_of(path: &Path, writes: bool) -> io::Result<Sockets> {
    let image = open_image_to_send(path, writes)?;
    let prefix = ImageId::of(&image)?.socket_prefix();
    let names = names_in(&std::fs::read("/proc/net/unix")?, prefix.as_bytes());
    Ok(Sockets { image, names, peers: Peers::of_owner(None) })
}

/// The names with this start in the text of /proc/net/unix. The name of an abstract socket is the last word of its
/// line, after `@`.
fn names_in(table: &[u8], prefix: &[u8]) -> Vec<Vec<u8>> {
    let name = |line: &[u8]| Some(line.rsplit(|byte| *byte == b' ').next()?.strip_prefix(b"@")?.to_vec());
    table.split(|byte| *byte == b'\n').filter_map(name).filter(|name| name.starts_with(prefix)).collect()
}

/// An image that this process has open, for the commands of other processes (P3).
#[derive(Debug)]
pub struct OpenImage {
    id: ImageId,
    owner: u32,
    fs: Weak<Fs>,
    root: InodeId,
}

impl OpenImage {
    /// The image with this identity, which holds `fs`.
    pub fn new(id: ImageId, fs: &Arc<Fs>) -> Self {
        Self { id, owner: rustix::process::getuid().as_raw(), fs: Arc::downgrade(fs), root: fs.root() }
    }
}

impl Host for OpenImage {
    fn filesystem(&self) -> Option<Arc<Fs>> {
        self.fs.upgrade()
    }

    fn owner(&self) -> Option<u32> {
        Some(self.owner)
    }

    /// The image stands for its root directory.
    fn file(&self, file: BorrowedFd<'_>) -> Result<OpenFile> {
        let wrong = || CommandFailure::new(Errno::BADF, "the command must come with a descriptor of the image");
        let flags = fcntl_getfl(file).map_err(|_| wrong())?;
        if flags.contains(OFlags::PATH) || ImageId::of(file).map_err(|_| wrong())? != self.id {
            return Err(wrong());
        }
        let is_writable = flags.contains(OFlags::RDWR) || flags.contains(OFlags::WRONLY);
        Ok(OpenFile { is_writable, is_read_only_mount: !is_writable, ..OpenFile::of_image(self.root) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_an_image_are_found_by_their_names() {
        let file = tempfile::tempfile().unwrap();
        let prefix = ImageId::of(&file).unwrap().socket_prefix();
        let resize = ImageWork::Resize.socket_prefix(ImageId::of(&file).unwrap()) + "1-2";
        assert!(resize.starts_with(&prefix));
        assert_eq!(ImageWork::of_socket(resize.as_bytes()), Some(ImageWork::Resize));
        assert_eq!(ImageWork::of_socket(b"ubtrfs-1-2"), None);
        let line = |name: &str| format!("0000000000000000: 00000002 00000000 00010000 0001 01 12345 {name}\n");
        let table = ["Num RefCount Path\n".to_owned(), line("/run/x"), line("@other"), line(&format!("@{prefix}1-2"))];
        let found = names_in(table.concat().as_bytes(), prefix.as_bytes());
        assert_eq!(found, [format!("{prefix}1-2").into_bytes()]);
        let other = tempfile::tempfile().unwrap();
        assert_ne!(ImageId::of(&other).unwrap(), ImageId::of(&file).unwrap());
    }

    #[test]
    fn a_socket_that_accepts_nobody_holds_nothing_up() {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
        let file = tempfile::NamedTempFile::new().unwrap();
        let name = format!("{}0", ImageId::of(file.as_file()).unwrap().socket_prefix());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = || rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let decoy = socket();
        rustix::net::bind(&decoy, &address).unwrap();
        rustix::net::listen(&decoy, 0).unwrap();
        let mut clients = Vec::new();
        loop {
            let client = socket();
            if rustix::net::connect(&client, &address).is_err() {
                break;
            }
            clients.push(client);
        }
        let began = std::time::Instant::now();
        assert!(crate::Channel::open_image(file.path(), true).is_none());
        assert!(began.elapsed() < std::time::Duration::from_secs(5), "{:?}", began.elapsed());
    }
}
