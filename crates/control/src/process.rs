//! Groups, capabilities and umasks of processes, from /proc.
//!
//! A process that is not visible in /proc (because it ended or is in another pid namespace) counts as having no
//! supplementary groups, and only the capabilities that its user id implies. Capabilities count only in the server's
//! user namespace, because any process can have all of them in a namespace that it created.

use std::fmt::Debug;
use std::os::unix::fs::FileExt;

use rustix::fs::OFlags;
use ubtrfs_format::print::escaped;

/// Looks up processes: in /proc, or through a helper process if the server is confined.
pub trait Processes: Debug + Send + Sync {
    /// Whether a process is in a supplementary group. If `uid` is given, all four user ids of the process must equal
    /// it, because a process that meanwhile runs a set-user-id program may have groups that its user lacks.
    fn is_in_group(&self, pid: u32, gid: u32, uid: Option<u32>) -> bool;

    /// Whether a capability of a process is effective; `None` if the process is not visible.
    fn has_capability(&self, pid: u32, capability: u32) -> Option<bool>;

    /// The umask of a process.
    fn umask_of(&self, pid: u32) -> Option<u32>;

    /// The file that a process has open under this descriptor number. If `uid` is given, all four user ids of the process
    /// must equal it.
    fn file_of(&self, pid: u32, descriptor: u32, uid: Option<u32>) -> Option<ProcessFile>;

    /// `len` bytes of the memory of a process; `None` if the memory is not readable, or if this process may not read it.
    fn memory_of(&self, pid: u32, address: u64, len: usize) -> Option<Vec<u8>>;

    /// Whether no descriptor that a process has open on this device (`st_dev`) was opened through a writable mount;
    /// `None` if the process has no such descriptor or is not visible. Descriptors of mounts that the process does not
    /// see any more count as if they were of this device and read-only.
    fn is_read_only_for(&self, pid: u32, device: u64) -> Option<bool>;
}

/// The identity of a file, as `stat` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileId {
    /// `st_dev`
    pub device: u64,
    /// `st_ino`
    pub ino: u64,
}

/// A file that a process has open, as /proc shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessFile {
    /// The file.
    pub id: FileId,
    /// Whether the process may read the file. False for a descriptor that only names the file (`O_PATH`).
    pub is_readable: bool,
    /// Whether the process may write to the file.
    pub is_writable: bool,
    /// Whether the file was opened through a read-only mount.
    pub is_read_only_mount: bool,
}

/// Tells that a process is stopped, by SIGSTOP or a debugger, and how it continues; `None` if it is not stopped.
pub fn stopped_process(pid: u32) -> Option<String> {
    let status = status(pid)?;
    let how = match field(&status, "State:")?.chars().next()? {
        'T' => format!("is stopped; continue it with: kill -CONT {pid}"),
        't' => "is stopped by a debugger".to_owned(),
        _ => return None,
    };
    let name = field(&status, "Name:").unwrap_or_default();
    Some(format!("process {pid} ({name}) does not answer, because it {how}"))
}

/// Looks up processes in /proc directly, for servers that are not confined.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalProcesses;

impl Processes for LocalProcesses {
    fn is_in_group(&self, pid: u32, gid: u32, uid: Option<u32>) -> bool {
        status(pid).is_some_and(|status| {
            uid.is_none_or(|uid| has_user(&status, uid)) && groups(&status).any(|group| group == gid)
        })
    }

    fn has_capability(&self, pid: u32, capability: u32) -> Option<bool> {
        let has_it = 1u64.checked_shl(capability)? & effective_capabilities(&status(pid)?)? != 0;
        let namespace = std::fs::read_link(format!("/proc/{pid}/ns/user")).ok()?;
        Some(has_it && namespace == std::fs::read_link("/proc/self/ns/user").ok()?)
    }

    fn umask_of(&self, pid: u32) -> Option<u32> {
        u32::from_str_radix(field(&status(pid)?, "Umask:")?, 8).ok()
    }

    /// Reads only /proc and never the filesystem of the file, because a filesystem that does not answer would block
    /// this process.
    fn file_of(&self, pid: u32, descriptor: u32, uid: Option<u32>) -> Option<ProcessFile> {
        let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).ok()?;
        let ino = field(&info, "ino:")?.parse().ok()?;
        let flags = OFlags::from_bits_retain(u32::from_str_radix(field(&info, "flags:")?, 8).ok()?);
        let table = std::fs::read(format!("/proc/{pid}/mountinfo")).ok()?;
        let mount = mount_of(&table, field(&info, "mnt_id:")?)?;
        // Read last: a process that has its number by now has another user, or could be controlled by this user anyway.
        if !uid.is_none_or(|uid| status(pid).is_some_and(|status| has_user(&status, uid))) {
            return None;
        }
        let access = flags & OFlags::RWMODE;
        let is_open = !flags.contains(OFlags::PATH);
        Some(ProcessFile {
            id: FileId { device: mount.device, ino },
            is_readable: is_open && access != OFlags::WRONLY,
            is_writable: is_open && access != OFlags::RDONLY,
            is_read_only_mount: mount.is_read_only,
        })
    }

    /// The kernel permits this under the rules for debuggers (ptrace), so root can read the memory of every process.
    fn memory_of(&self, pid: u32, address: u64, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        std::fs::File::open(format!("/proc/{pid}/mem")).ok()?.read_exact_at(&mut bytes, address).ok()?;
        Some(bytes)
    }

    fn is_read_only_for(&self, pid: u32, device: u64) -> Option<bool> {
        let table = std::fs::read(format!("/proc/{pid}/mountinfo")).ok()?;
        let mut found = None;
        // A mount that is not in the table belongs to another mount namespace, or is detached, and may be this device's.
        for entry in std::fs::read_dir(format!("/proc/{pid}/fdinfo")).ok()?.flatten() {
            let Ok(info) = std::fs::read_to_string(entry.path()) else { continue };
            let Some(mount) = field(&info, "mnt_id:").and_then(|id| mount_of(&table, id)) else {
                // Pipes, sockets and the like are in no table of mounts either.
                let link = std::fs::read_link(format!("/proc/{pid}/fd/{}", entry.file_name().to_str()?));
                if link.is_ok_and(|link| link.is_absolute() || link.starts_with("(unreachable)")) {
                    found = Some(true);
                }
                continue;
            };
            if mount.device == device {
                if !mount.is_read_only {
                    return Some(false);
                }
                found = Some(true);
            }
        }
        found
    }
}

impl LocalProcesses {
    /// Whether every user of the machine has a number in this user namespace.
    pub(crate) fn sees_all_users(&self) -> bool {
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        map.split_ascii_whitespace().eq(["0", "0", "4294967295"])
    }

    /// Whether a thread is being killed: a signal that ends the process has arrived, but the thread still runs. `None`
    /// if the thread is not visible.
    pub fn is_dying(&self, pid: u32) -> Option<bool> {
        Some(has_pending_kill(&status(pid)?))
    }
}

/// A mount, as a line of /proc/PID/mountinfo describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MountLine {
    device: u64,
    is_read_only: bool,
    /// The user who made a FUSE mount. The kernel knows it from mount(2), not from the server.
    maker: Option<u32>,
}

/// The user who made the FUSE mount of an open file of this process; `None` if the mount is not FUSE or is not visible
/// in this mount namespace.
pub(crate) fn mount_maker(descriptor: i32) -> Option<u32> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}")).ok()?;
    mount_of(&std::fs::read("/proc/self/mountinfo").ok()?, field(&info, "mnt_id:")?)?.maker
}

/// Finds the mount with this id in the text of /proc/PID/mountinfo. Lines begin with id, parent, `major:minor`, root,
/// mount point, and the options of this mount. After ` - ` come the type, the source, and the options of the filesystem.
fn mount_of(table: &[u8], id: &str) -> Option<MountLine> {
    table.split(|byte| *byte == b'\n').find_map(|line| {
        let mut fields = line.split(|byte| *byte == b' ');
        let device = if fields.next()? == id.as_bytes() { fields.nth(1)? } else { return None };
        let (major, minor) = std::str::from_utf8(device).ok()?.split_once(':')?;
        let is_read_only = fields.nth(2)?.split(|byte| *byte == b',').any(|option| option == b"ro");
        let mut of_filesystem = fields.skip_while(|field| *field != b"-").skip(1);
        let is_fuse = of_filesystem.next().is_some_and(|kind| kind.starts_with(b"fuse"));
        let user = |option: &[u8]| std::str::from_utf8(option.strip_prefix(b"user_id=")?).ok()?.parse().ok();
        let maker =
            of_filesystem.nth(1).filter(|_| is_fuse).and_then(|list| list.split(|byte| *byte == b',').find_map(user));
        Some(MountLine { device: rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?), is_read_only, maker })
    })
}

/// The status of a process. The process chooses its name, which may have any bytes; they are escaped.
fn status(pid: u32) -> Option<String> {
    Some(lines_of(&std::fs::read(format!("/proc/{pid}/status")).ok()?))
}

/// The lines of a text. Lines that are not UTF-8 are escaped.
fn lines_of(text: &[u8]) -> String {
    let line = |line: &[u8]| std::str::from_utf8(line).map_or_else(|_| escaped(line), str::to_owned) + "\n";
    text.split(|byte| *byte == b'\n').map(line).collect()
}

fn field<'s>(status: &'s str, name: &str) -> Option<&'s str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

/// Whether the real, effective, saved and filesystem user ids all equal `uid`.
fn has_user(status: &str, uid: u32) -> bool {
    let users = field(status, "Uid:").unwrap_or_default();
    !users.is_empty() && users.split_ascii_whitespace().all(|user| user.parse() == Ok(uid))
}

/// Whether a process belongs to this user, with all its user ids.
pub fn is_of_user(pid: u32, uid: u32) -> bool {
    status(pid).is_some_and(|status| has_user(&status, uid))
}

/// The effective capabilities that a process's status shows.
fn effective_capabilities(status: &str) -> Option<u64> {
    u64::from_str_radix(field(status, "CapEff:")?, 16).ok()
}

/// Whether the thread has a pending SIGKILL. The kernel adds it to all threads of a process when any signal kills the
/// process without dumping core.
fn has_pending_kill(status: &str) -> bool {
    const SIGKILL: u64 = 1 << 8;
    field(status, "SigPnd:").and_then(|bits| u64::from_str_radix(bits, 16).ok()).is_some_and(|bits| bits & SIGKILL != 0)
}

/// The supplementary groups that a process's status lists.
fn groups(status: &str) -> impl Iterator<Item = u32> {
    let list = field(status, "Groups:").unwrap_or_default();
    list.split_ascii_whitespace().filter_map(|group| group.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_a_status() {
        assert_eq!(effective_capabilities("CapPrm:\tff\nCapEff:\t0000000000000208\n"), Some(0x208));
        assert_eq!(effective_capabilities("CapPrm:\tff\n"), None);
        assert_eq!(LocalProcesses.has_capability(u32::MAX, 3), None);
    }

    #[test]
    fn a_name_that_is_no_text_hides_nothing() {
        let status = lines_of(b"Name:\t\xff\xfe\nCapEff:\t0000000000000208\n");
        assert_eq!(effective_capabilities(&status), Some(0x208));
    }

    #[test]
    fn a_pending_kill_is_read_from_a_status() {
        assert!(has_pending_kill("ShdPnd:\t0000000000004000\nSigPnd:\t0000000000000100\n"));
        assert!(!has_pending_kill("SigPnd:\t0000000000000200\nShdPnd:\t0000000000000100\n"));
        assert_eq!(LocalProcesses.is_dying(std::process::id()), Some(false));
    }

    #[test]
    fn groups_are_read_from_a_status() {
        assert_eq!(groups("Name:\tx\nGroups:\t4 24 1000 \nNgid:\t0\n").collect::<Vec<_>>(), [4, 24, 1000]);
        assert_eq!(groups("Groups:\t \n").count() + groups("").count(), 0);
    }

    #[test]
    fn the_memory_of_this_process_is_readable() {
        let bytes = *b"some bytes";
        let found = LocalProcesses.memory_of(std::process::id(), bytes.as_ptr().addr() as u64, bytes.len());
        assert_eq!(found.as_deref(), Some(&bytes[..]));
        assert_eq!(LocalProcesses.memory_of(std::process::id(), 0, 8), None);
        assert_eq!(LocalProcesses.memory_of(u32::MAX, 0, 8), None);
    }

    #[test]
    fn files_behind_descriptors_are_found() {
        use std::os::fd::AsRawFd;
        let file = tempfile::tempfile().unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        let descriptor = u32::try_from(file.as_raw_fd()).unwrap();
        let (pid, uid) = (std::process::id(), rustix::process::getuid().as_raw());
        let found = LocalProcesses.file_of(pid, descriptor, Some(uid));
        // Before Linux 5.14, /proc does not show the inode number of an open file, so `file_of` finds nothing.
        if let Some(found) = found {
            assert_eq!(found.id, FileId { device: stat.st_dev, ino: stat.st_ino });
            assert!(found.is_readable && found.is_writable && !found.is_read_only_mount);
            let named = format!("/proc/self/fd/{descriptor}");
            let flags = OFlags::PATH | OFlags::CLOEXEC;
            let path = rustix::fs::open(named, flags, rustix::fs::Mode::empty()).unwrap();
            let only_named = LocalProcesses.file_of(pid, u32::try_from(path.as_raw_fd()).unwrap(), None).unwrap();
            assert!(only_named.id == found.id && !only_named.is_readable && !only_named.is_writable);
        }
        assert_eq!(LocalProcesses.file_of(pid, u32::MAX, None), None);
        assert_eq!(LocalProcesses.file_of(pid, descriptor, Some(uid + 1)), None, "of another user");
        let table =
            b"36 35 98:0 / /mnt rw - btrfs x rw,user_id=3\n7 1 0:52 / /ro nodev,ro - fuse x rw,user_id=70,group_id=1\n";
        assert_eq!(mount_of(table, "7"), Some(MountLine { device: 52, is_read_only: true, maker: Some(70) }));
        assert_eq!(mount_of(table, "36").and_then(|mount| mount.maker), None, "only FUSE says who mounted");
        assert_eq!(mount_of(table, "36").map(|mount| mount.is_read_only), Some(false));
        assert_eq!(LocalProcesses.is_read_only_for(std::process::id(), u64::MAX), None);
    }

    #[test]
    fn a_process_of_another_user_by_now_is_not_taken_for_the_user() {
        assert!(has_user("Uid:\t7\t7\t7\t7\n", 7) && !has_user("Uid:\t7\t0\t0\t0\n", 7) && !has_user("", 7));
        let (pid, uid) = (std::process::id(), rustix::process::getuid().as_raw());
        let Some(status) = status(pid) else { return };
        for gid in groups(&status) {
            assert!(LocalProcesses.is_in_group(pid, gid, Some(uid)) && LocalProcesses.is_in_group(pid, gid, None));
            assert!(!LocalProcesses.is_in_group(pid, gid, Some(uid + 1)));
        }
    }
}
