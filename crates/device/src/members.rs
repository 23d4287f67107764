//! Finds the other devices of a filesystem by its UUID: image files beside the first one, and block devices.
//!
//! Invariants:
//! - I1. Nothing is opened but regular files of the same directory, never through a link, and block devices of this
//!   machine; so a name that another user put there leads nowhere else.
//! - I2. Nothing is written or locked here. Superblocks are untrusted: they only choose which devices the caller opens
//!   and checks.
//! - I3. A file is found only if its owner owns a given file. Block devices are found only for given block devices, and
//!   for given files of the calling user. The member with the newest superblock decides what the filesystem shows, and
//!   older members are overwritten. So nobody's file or device joins a filesystem of another user.
//! - I4. A device id belongs to one device. Two devices with the same id, such as a copied image beside its original, are
//!   an error unless the caller has named one of them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use ubtrfs_format::superblock::{MAGIC, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use uuid::Uuid;

/// Candidates that are examined at most, so that a huge directory does not delay an open for ever.
const CANDIDATES_MAX: usize = 65_536;

/// Returns the paths of the devices that belong to the filesystem of these devices, but are not among them. A
/// filesystem with one device, or without a readable superblock, has none. Devices that are not found are left out: the
/// caller learns of them when it opens the filesystem.
///
/// # Errors
/// Two devices that were found have the same device id.
pub fn find_members(given: &[&Path]) -> io::Result<Vec<PathBuf>> {
    let known: Vec<Member> = given.iter().filter_map(|path| Member::of(path, OFlags::empty())).collect();
    let Some(first) = known.first().filter(|first| first.nr_devices > known.len() as u64) else {
        return Ok(Vec::new());
    };
    let own = rustix::process::geteuid().as_raw();
    let may_find_blocks = known.iter().all(|given| given.place.0 || given.owner == own);
    // I3
    let is_trusted = |member: &Member| match member.place.0 {
        true => may_find_blocks,
        false => known.iter().any(|given| !given.place.0 && given.owner == member.owner),
    };
    let mut found: BTreeMap<u64, Member> = BTreeMap::new();
    for path in candidates(given) {
        let Some(member) = Member::of(&path, OFlags::NOFOLLOW) else { continue };
        let is_known = known.iter().any(|other| other.place == member.place || other.devid == member.devid);
        if member.fsid != first.fsid || is_known || !is_trusted(&member) {
            continue;
        }
        match found.get(&member.devid) {
            Some(other) if other.place != member.place => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    format!(
                        "{} and {} are both device {} of the filesystem {}; name the right one with -o device=, or move the \
                         copy elsewhere",
                        ubtrfs_format::print::escaped(other.path.as_os_str().as_encoded_bytes()),
                        ubtrfs_format::print::escaped(member.path.as_os_str().as_encoded_bytes()),
                        member.devid,
                        member.fsid
                    ),
                ));
            }
            Some(_) => {}
            None => {
                found.insert(member.devid, member);
            }
        }
    }
    Ok(found.into_values().map(|member| member.path).collect())
}

/// A device with a superblock.
struct Member {
    path: PathBuf,
    /// What tells devices apart: `st_rdev` of a block device, `st_dev` and `st_ino` of a file.
    place: (bool, u64, u64),
    owner: u32,
    fsid: Uuid,
    devid: u64,
    nr_devices: u64,
}

impl Member {
    /// Reads the primary superblock. `None` for everything that is no device of a filesystem. Does not wait for the
    /// writer of a pipe.
    fn of(path: &Path, flags: OFlags) -> Option<Self> {
        let bits = i32::try_from((flags | OFlags::NONBLOCK).bits()).ok()?;
        let file = File::options().read(true).custom_flags(bits).open(path).ok()?;
        let metadata = file.metadata().ok()?;
        let is_block = metadata.file_type().is_block_device();
        if !is_block && !metadata.is_file() {
            return None;
        }
        let mut raw = vec![0; SUPERBLOCK_SIZE];
        file.read_exact_at(&mut raw, SUPERBLOCK_OFFSETS[0]).ok()?;
        let superblock = Superblock::decode(&raw).ok().filter(|superblock| superblock.magic == MAGIC)?;
        let place = if is_block { (true, metadata.rdev(), 0) } else { (false, metadata.dev(), metadata.ino()) };
        let (devid, nr_devices) = (superblock.dev_item.devid.0, superblock.num_devices);
        let owner = metadata.uid();
        Some(Self { path: path.to_owned(), place, owner, fsid: superblock.fsid, devid, nr_devices })
    }
}

/// Regular files beside the given ones, and the block devices of this machine (I1).
fn candidates(given: &[&Path]) -> Vec<PathBuf> {
    let mut dirs: Vec<&Path> = given.iter().filter(|path| path.is_file()).filter_map(|path| path.parent()).collect();
    dirs.sort_unstable();
    dirs.dedup();
    let dirs = dirs.into_iter().map(|dir| if dir.as_os_str().is_empty() { Path::new(".") } else { dir });
    let is_regular = |entry: &std::fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
    let beside = dirs.filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().filter_map(Result::ok);
    let beside = beside.take(CANDIDATES_MAX).filter(is_regular).map(|entry| {
        let path = entry.path();
        path.strip_prefix(".").map(Path::to_owned).unwrap_or(path)
    });
    let mut all: Vec<PathBuf> = beside.chain(block_devices()).collect();
    all.sort_unstable();
    all
}

/// The block devices of this machine, as paths in `/dev`.
pub fn block_devices() -> Vec<PathBuf> {
    let names = std::fs::read_dir("/sys/class/block").into_iter().flatten().filter_map(Result::ok);
    let mut all: Vec<PathBuf> =
        names.take(CANDIDATES_MAX).map(|entry| Path::new("/dev").join(entry.file_name())).collect();
    all.sort_unstable();
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes the superblock of a device of a filesystem with three devices.
    fn device(dir: &Path, name: &str, devid: u64, fsid: u128) -> PathBuf {
        let path = dir.join(name);
        let mut superblock = Superblock::decode(&[0; SUPERBLOCK_SIZE]).expect("long enough");
        superblock.magic = MAGIC;
        superblock.fsid = Uuid::from_u128(fsid);
        superblock.num_devices = 3;
        superblock.dev_item.devid.0 = devid;
        let mut raw = vec![0; 65536];
        raw.extend(superblock.encode());
        std::fs::write(&path, raw).expect("a scratch file");
        path
    }

    #[test]
    fn files_of_the_filesystem_beside_the_first_are_found_once() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let at = |name: &str| dir.path().join(name);
        let first = device(dir.path(), "a", 1, 7);
        let second = device(dir.path(), "b", 2, 7);
        let third = device(dir.path(), "c", 3, 7);
        device(dir.path(), "foreign", 2, 8);
        std::fs::write(at("text"), "no device").expect("a scratch file");
        std::os::unix::fs::symlink(&second, at("link")).expect("a scratch link");
        std::fs::hard_link(&third, at("hard")).expect("a scratch link");
        let find = |given: &[&Path]| find_members(given);
        assert_eq!(find(&[&first]).expect("no copies"), vec![second.clone(), third.clone()]);
        assert_eq!(find(&[&second, &first]).expect("no copies"), std::slice::from_ref(&third));
        assert_eq!(find(&[&first, &second, &third]).expect("no copies"), Vec::<PathBuf>::new());
        assert_eq!(find(&[&at("text")]).expect("no copies"), Vec::<PathBuf>::new());
    }

    #[test]
    fn files_of_another_owner_are_not_adopted() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can give files away");
            return;
        }
        let dir = tempfile::tempdir().expect("a scratch directory");
        let first = device(dir.path(), "a", 1, 7);
        let second = device(dir.path(), "b", 2, 7);
        std::os::unix::fs::chown(&second, Some(65534), None).expect("root gives it away");
        assert_eq!(find_members(&[&first]).expect("no copies"), Vec::<PathBuf>::new(), "I3: a file of another user");
        assert_eq!(find_members(&[&second]).expect("no copies"), Vec::<PathBuf>::new(), "I3: a file of root");
        std::os::unix::fs::chown(&first, Some(65534), None).expect("root gives it away");
        assert_eq!(find_members(&[&first]).expect("no copies"), std::slice::from_ref(&second));
    }

    #[test]
    fn a_pipe_without_a_writer_is_no_device() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.expect("coreutils has it").success());
        assert_eq!(find_members(&[&pipe]).expect("not a device"), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_copy_beside_its_original_is_an_error_unless_one_is_named() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let first = device(dir.path(), "a", 1, 7);
        let second = device(dir.path(), "b", 2, 7);
        device(dir.path(), "b copy", 2, 7);
        let error = find_members(&[&first]).expect_err("two devices 2").to_string();
        assert!(
            error.contains("b copy") && error.contains("are both device 2") && error.contains("-o device="),
            "{error}"
        );
        assert_eq!(find_members(&[&first, &second]).expect("named"), Vec::<PathBuf>::new());
    }
}
