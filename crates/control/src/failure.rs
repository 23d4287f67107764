//! [`CommandFailure`]: the error of a command, as sent to the client.

use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use ubtrfs_fs::{Error, Fs};

/// Result of a command.
pub type Result<T, E = CommandFailure> = std::result::Result<T, E>;

/// The error of a command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{text}")]
pub struct CommandFailure {
    /// The error number, which an ioctl returns.
    pub errno: i32,
    /// The reason, in one line.
    pub text: String,
    /// Whether the text says what to do next. A client adds advice for the error number only if this is false.
    #[serde(default)]
    pub has_advice: bool,
}

impl CommandFailure {
    /// A failure whose text says what to do.
    pub fn new(errno: Errno, text: impl Into<String>) -> Self {
        Self { errno: errno.raw_os_error(), text: text.into(), has_advice: true }
    }

    /// The error number.
    pub fn errno(&self) -> Errno {
        Errno::from_raw_os_error(self.errno)
    }

    /// If the filesystem has turned read-only, replaces the text of `EROFS` and `EIO` by the reason. `EROFS` and `EIO`
    /// alone do not tell whether another writer, a bad device or a full host disk caused the error.
    pub(crate) fn explained(self, fs: &Fs) -> Self {
        match fs.read_only().filter(|_| !fs.options().read_only) {
            Some(reason) if matches!(self.errno(), Errno::ROFS | Errno::IO) => {
                Self { text: format!("the filesystem has turned read-only: {reason}"), has_advice: true, ..self }
            }
            _ => self,
        }
    }
}

impl From<Error> for CommandFailure {
    fn from(error: Error) -> Self {
        Self { errno: error.errno(), text: error.to_string(), has_advice: false }
    }
}

impl From<ubtrfs_error::Error> for CommandFailure {
    fn from(error: ubtrfs_error::Error) -> Self {
        Error::from(error).into()
    }
}
