//! Two system calls on mounts: changing the flags of a mount that is on no directory yet, and opening the root of a FUSE
//! filesystem through any of its mounts.
//!
//! A mount of a subdirectory shows no way to the directories above. A file handle leads there: the kernel finds the root
//! of a FUSE filesystem by its node number, which the protocol fixes.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::MountAttrFlags;

/// Sets the flags `set` of a mount, and removes the flags `clear`. `mount` is the open root directory of the mount.
///
/// # Errors
/// `ENOSYS` before Linux 5.12.
#[allow(unsafe_code, reason = "the system call has no safe wrapper")]
pub fn change_mount_flags(mount: impl AsFd, set: MountAttrFlags, clear: MountAttrFlags) -> io::Result<()> {
    let attr = MountAttr { set: set.bits().into(), clear: clear.bits().into(), propagation: 0, user_namespace: 0 };
    // SAFETY: the path is a C string, and the kernel reads as many bytes from `attr` as the last argument states.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_fd().as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            &raw const attr,
            size_of::<MountAttr>(),
        )
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Opens the root directory of the FUSE filesystem that has this mount, as a path (`O_PATH`). The mount may show any
/// directory of the filesystem; `mount` is its root directory. The server must be answering.
///
/// # Errors
/// `EPERM` without CAP_DAC_READ_SEARCH, `ESTALE` if it is not a FUSE filesystem, `EOPNOTSUPP` if the server has no file
/// handles.
#[allow(unsafe_code, reason = "the system call has no safe wrapper")]
pub fn open_fuse_root(mount: impl AsFd) -> io::Result<OwnedFd> {
    use std::os::fd::FromRawFd;
    // The call takes no descriptor that is only a path.
    let mount = openat(mount, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let mut handle = FuseHandle { len_bytes: 12, kind: FILEID_INO64_GEN, node: [0, ROOT_NODE], generation: 0 };
    // SAFETY: `handle` has the layout of `struct file_handle`, whose first field states how many bytes follow the head.
    let opened = unsafe {
        libc::open_by_handle_at(
            mount.as_raw_fd(),
            (&raw mut handle).cast(),
            libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC,
        )
    };
    if opened < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has made this descriptor, so nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(opened) })
}

/// `struct mount_attr` of linux/mount.h.
#[repr(C)]
struct MountAttr {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// `struct file_handle` with a handle of FUSE: the node number, high half first, and the generation.
#[repr(C)]
struct FuseHandle {
    len_bytes: u32,
    kind: i32,
    node: [u32; 2],
    generation: u32,
}

/// The type of handles that have a 64-bit inode number and a generation, as name_to_handle_at(2) shows it for a FUSE
/// mount.
const FILEID_INO64_GEN: i32 = 0x81;
/// The node number of the root of every FUSE filesystem.
const ROOT_NODE: u32 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fuse_filesystems_have_such_a_root() {
        let dir = rustix::fs::open("/proc", OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
        assert!(open_fuse_root(&dir).is_err());
        assert!(open_fuse_root(std::fs::File::open("/").unwrap()).is_err());
    }

    #[test]
    fn a_directory_that_is_no_root_of_a_mount_has_no_flags() {
        let dir = std::fs::File::open("/proc/self").unwrap();
        assert!(change_mount_flags(dir, MountAttrFlags::MOUNT_ATTR_NOEXEC, MountAttrFlags::empty()).is_err());
    }
}
