//! An ioctl that asks the server of a mount for a short text.

use std::io;
use std::os::fd::AsFd;

use rustix::fs::FileType;
use rustix::io::Errno;
use rustix::ioctl;

/// The ioctl of [`ask_mount`]: `_IOR('u', 0xb7, char[64])`. The ioctl's number states the length of the answer, as the
/// kernel requires to pass an ioctl on to a FUSE server.
pub const ASK_MOUNT: u32 = 2 << 30 | (ASK_MOUNT_LEN as u32) << 16 | 0x75 << 8 | 0xb7;
/// Bytes of the answer, zeros at its end included.
pub const ASK_MOUNT_LEN: usize = 64;
/// `FUSE_SUPER_MAGIC`, the type of filesystem that statfs(2) shows.
const FUSE: i64 = 0x6573_5546;

/// Asks the FUSE server for a short text. `file` is an open file or directory of the server's mount. Fails with
/// `ENOTTY` if the file is not in a FUSE mount, or if the server does not know this ioctl.
#[allow(unsafe_code, reason = "the system call has no safe wrapper")]
pub fn ask_mount(file: impl AsFd) -> io::Result<Vec<u8>> {
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
    if !matches!(kind, FileType::RegularFile | FileType::Directory) || rustix::fs::fstatfs(&file)?.f_type != FUSE {
        return Err(Errno::NOTTY.into());
    }
    // SAFETY: the ioctl of a file or directory in a FUSE mount is handled by the kernel's FUSE code, which writes at
    // most as many bytes as the ioctl's number states: the length of the array.
    let answer =
        unsafe { ioctl::ioctl(file, ioctl::Getter::<{ ASK_MOUNT as ioctl::Opcode }, [u8; ASK_MOUNT_LEN]>::new())? };
    Ok(answer.split(|byte| *byte == 0).next().unwrap_or_default().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fuse_mounts_are_asked() {
        for path in ["/proc", "/dev/null", "/proc/self/exe"] {
            let error = ask_mount(std::fs::File::open(path).unwrap()).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::NOTTY.raw_os_error()), "{path}");
        }
    }
}
