//! [`Failure`]: why a command failed, as it travels to the client.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_fs::{Error, Fs};

/// Result of a command.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// Why a command failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub struct Failure {
    /// The error number that an ioctl returns for this.
    pub errno: i32,
    /// Why, in one line.
    pub text: String,
    /// Whether the text says what to do, so that a client adds no advice of its own for the error number.
    #[serde(default)]
    pub has_advice: bool,
}

impl Failure {
    /// A failure whose text says what to do.
    pub fn new(errno: Errno, text: impl Into<String>) -> Self {
        Self { errno: errno.raw_os_error(), text: text.into(), has_advice: true }
    }

    /// Its error number.
    pub fn errno(&self) -> Errno {
        Errno::from_raw_os_error(self.errno)
    }

    /// Explains a failure of the whole filesystem, whose error number alone tells another writer, a bad device and a
    /// full host not apart.
    pub(crate) fn explained(self, fs: &Fs) -> Self {
        match fs.read_only().filter(|_| !fs.options().read_only) {
            Some(reason) if matches!(self.errno(), Errno::ROFS | Errno::IO) => {
                Self { text: format!("the filesystem takes no changes any more: {reason}"), has_advice: true, ..self }
            }
            _ => self,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { errno: error.errno(), text: error.to_string(), has_advice: false }
    }
}

impl From<ubtrfs_error::Error> for Failure {
    fn from(error: ubtrfs_error::Error) -> Self {
        Error::from(error).into()
    }
}
