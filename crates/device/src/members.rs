//! Finds the other devices of a filesystem by its UUID: image files beside the first one, and block devices.
//!
//! Invariants:
//! - I1. Nothing is opened but regular files of the same directory, never through a link, and block devices of this
//!   machine; so a name that another user put there leads nowhere else. Exports of NBD servers are examined if they are given,
//!   and never found.
//! - I2. Nothing is written or locked here. Superblocks are untrusted: they only choose which devices the caller opens
//!   and checks.
//! - I3. A file is found only if its owner owns a given file. Block devices are found only for given block devices, and
//!   for given files of the calling user. The member with the newest superblock decides what the filesystem shows, and
//!   older members are overwritten. So nobody's file or device joins a filesystem of another user. A member that is left
//!   out for this reason is returned apart, for a message.
//! - I4. A device id belongs to one device. Two devices with the same id, such as a copied image beside its original, are
//!   an error unless the caller has named one of them, or one of them missed changes and the other one did not.
//! - I5. A device that missed changes is brought up to date, which overwrites it. Such a device may be a backup. So the
//!   search never returns it as a member, and it joins only if the caller names it. A device that is one generation
//!   behind counts as complete here, because a power cut between two superblocks leaves the same difference.
//! - I6. An image file and the loop devices over it are one device. The given one counts, or else the file.
//! - I7. A device that was replaced, or whose id another one has by now, may still have its superblock. The device in its
//!   place has a device item of a later generation, and is found alone. Naming the older one is an error.
//! - I8. A replacement that is not complete has a new device with the id 0, which the number of devices does not count. It
//!   is searched for filesystems with several devices: the only device of a filesystem needs no search, which may take long.
//! - I9. Superblocks do not tell on which seed a filesystem builds. So if devices are missing, all seed devices are returned
//!   that the filesystem may build on, as far as I1 and I3 allow: they are older than it, and their device ids are free. The
//!   caller opens only those that the chunk tree names: most are of other filesystems, and may be in use.
//! - I10. A device that was removed while it was away has its superblock, and looks like one that missed changes. So a
//!   device that missed changes does not count when the devices are counted, and beside all others it is not mentioned.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use ubtrfs_format::print::escaped;
use ubtrfs_format::superblock::{MAGIC, SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock, flags};
use ubtrfs_format::{DevId, check_superblock};
use uuid::Uuid;

use crate::mounted::loop_file;
use crate::nbd_device::{is_url, probe};

/// Candidates that are examined at most, so that a huge directory does not delay an open for ever.
const CANDIDATES_MAX: usize = 65_536;

/// The device id of the new device of a replacement (I8).
const TARGET_DEVID: u64 = DevId::REPLACEMENT_TARGET.0;

/// The owner of an export: no user, so nothing is found for it (I3).
const NOBODY: u32 = u32::MAX;

/// The devices of a filesystem that were found beside the given ones.
#[derive(Debug, Default)]
pub struct FoundMembers {
    /// The devices that belong to the filesystem.
    pub found: Vec<PathBuf>,
    /// Seed devices on which the filesystem may build (I9).
    pub seeds: Vec<PossibleSeed>,
    /// Devices that missed changes, whose device id no other device has (I5).
    pub left_out: Vec<MissedChanges>,
    /// Devices that I3 leaves out, and whose device id no other device has.
    pub of_others: Vec<DeviceOfOther>,
}

/// A device that was found, and is not used, because it may be of somebody else (I3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceOfOther {
    /// The device.
    pub path: PathBuf,
    /// The owner of an image file; `None` for a block device.
    pub owner: Option<u32>,
}

impl fmt::Display for DeviceOfOther {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = escaped(self.path.as_os_str().as_encoded_bytes());
        match self.owner {
            Some(owner) => write!(
                f,
                "{path} is not used: it belongs to user {owner}, and the search takes only files of the owner of the named image"
            )?,
            None => write!(
                f,
                "{path} is not used: the search takes block devices only for a named block device, or an image file that you own"
            )?,
        }
        write!(f, "; if you trust it, name it: -o device={path}")
    }
}

/// A seed device on which a filesystem builds, if its chunk tree has this id and this UUID.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PossibleSeed {
    /// The device.
    pub path: PathBuf,
    /// Its device id.
    pub devid: DevId,
    /// Its device UUID.
    pub uuid: Uuid,
}

/// A device that was found, and is not used, because it missed changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissedChanges {
    /// The device.
    pub path: PathBuf,
    /// The generation of its superblock.
    pub generation: u64,
    /// The newest generation of the filesystem's devices.
    pub newest: u64,
}

impl fmt::Display for MissedChanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = escaped(self.path.as_os_str().as_encoded_bytes());
        let Self { generation, newest, .. } = self;
        write!(
            f,
            "{path} is not used: it has generation {generation}, and the newest is {newest}, so it missed changes; if it is a \
             device of this filesystem and no backup, name it, and it is overwritten with what it missed: -o device={path}; \
             else go on without it: -o degraded"
        )
    }
}

/// Returns the devices that belong to the filesystem of these devices, but are not among them: none if the
/// only device of a filesystem is given (I8), or one without a readable superblock. Devices that are not found are left
/// out: the caller learns of them when it opens the filesystem. Seed devices are only possible ones (I9).
///
/// # Errors
/// Two devices that were found have the same device id (I4).
pub fn find_members(given: &[&Path]) -> io::Result<FoundMembers> {
    let known: Vec<ScannedDevice> = given.iter().filter_map(|path| ScannedDevice::of(path, OFlags::empty())).collect();
    let top = known.iter().find(|member| !member.is_seed).or(known.first());
    let newest_of =
        |members: &mut dyn Iterator<Item = &ScannedDevice>| members.filter_map(|member| member.generation).max();
    let newest_given = newest_of(&mut known.iter());
    // I10
    let nr_known_at = |newest: u64| {
        let is_whole = |member: &ScannedDevice| !member.generation.is_some_and(|own| is_behind(own, newest));
        let counts = |member: &&ScannedDevice| {
            member.devid != TARGET_DEVID
                && (member.is_seed || top.is_some_and(|top| top.fsid == member.fsid) && is_whole(member))
        };
        known.iter().filter(counts).count() as u64
    };
    let nr_known = nr_known_at(newest_given.unwrap_or_default());
    let has_all = |first: &&ScannedDevice| nr_known >= first.nr_devices;
    let Some(first) = top.filter(|first| !has_all(first) || first.nr_devices > 1) else {
        return Ok(FoundMembers::default());
    };
    let only_target = has_all(&first);
    let own = rustix::process::geteuid().as_raw();
    let may_find_blocks = known.iter().all(|given| given.is_block || given.owner == own);
    // I3
    let is_trusted = |member: &ScannedDevice| match member.is_block {
        true => may_find_blocks,
        false => known.iter().any(|given| !given.is_block && given.owner == member.owner),
    };
    let mut found: BTreeMap<u64, Vec<ScannedDevice>> = BTreeMap::new();
    let mut seeds: Vec<ScannedDevice> = Vec::new();
    let mut of_others: Vec<ScannedDevice> = Vec::new();
    for path in candidates(given) {
        let Some(member) = ScannedDevice::of(&path, OFlags::NOFOLLOW) else { continue };
        if only_target && member.devid != TARGET_DEVID {
            continue;
        }
        if member.is_seed && member.fsid != first.fsid && is_trusted(&member) {
            if !known.iter().chain(&seeds).any(|other| other.place == member.place) {
                seeds.push(member);
            }
            continue;
        }
        if member.fsid != first.fsid || known.iter().any(|other| other.place == member.place) {
            continue;
        }
        if !is_trusted(&member) {
            of_others.push(member);
            continue;
        }
        if let Some(own) = known.iter().find(|own| own.devid == member.devid) {
            if member.is_in_place_of(own) {
                return Err(replaced(own, &member));
            }
            continue;
        }
        let others = found.entry(member.devid).or_default();
        if !others.iter().any(|other| other.place == member.place) {
            others.push(member);
        }
    }
    let all = || known.iter().chain(found.values().flatten());
    let newest = newest_of(&mut all()).unwrap_or_default();
    let nr_devices = all().max_by_key(|member| member.generation).map_or(first.nr_devices, |newest| newest.nr_devices);
    // Whether a found device says that all given ones missed changes. Then the copies have no judge.
    let is_ahead = newest_given.is_none_or(|given| is_behind(given, newest));
    let mut members = FoundMembers::default();
    let devids: Vec<u64> = found.keys().copied().collect();
    for (_, mut candidates) in found {
        let all: Vec<(DeviceIdentity, u64)> =
            candidates.iter().map(|member| (member.place.clone(), member.since)).collect();
        candidates.retain(|member| {
            let is_later = |(place, since): &(DeviceIdentity, u64)| {
                *place != member.place && member.generation.is_some_and(|generation| generation < *since)
            };
            !all.iter().any(is_later)
        });
        if is_ahead && let [one, other, ..] = candidates.as_slice() {
            return Err(ambiguous(one, other));
        }
        let (mut whole, mut behind) = (Vec::new(), Vec::new());
        for member in candidates {
            match member.generation {
                Some(generation) if is_behind(generation, newest) => {
                    behind.push(MissedChanges { path: member.path, generation, newest })
                }
                _ => whole.push(member),
            }
        }
        // A device without a valid superblock does not count beside another one.
        if whole.iter().any(|member| member.generation.is_some()) {
            whole.retain(|member| member.generation.is_some());
        }
        match whole.as_slice() {
            [one, other, ..] => return Err(ambiguous(one, other)),
            [] => members.left_out.extend(behind),
            [_] => members.found.extend(whole.into_iter().map(|member| member.path)),
        }
    }
    let is_lacking = |member: &ScannedDevice| {
        member.generation.is_some()
            && !known.iter().any(|own| own.devid == member.devid)
            && !devids.contains(&member.devid)
    };
    of_others.retain(is_lacking);
    let of_other =
        |member: ScannedDevice| DeviceOfOther { path: member.path, owner: (!member.is_block).then_some(member.owner) };
    members.of_others.extend(of_others.into_iter().map(of_other));
    // I9. A seed device that is named counts, and its copies do not.
    let is_named =
        |seed: &ScannedDevice| known.iter().any(|given| (given.fsid, given.devid) == (seed.fsid, seed.devid));
    seeds.retain(|seed| !is_named(seed));
    let nr_complete = nr_known_at(newest).saturating_add(members.found.len() as u64);
    if nr_complete >= nr_devices {
        members.left_out.clear();
    } else {
        let is_free = |seed: &ScannedDevice| !known.iter().any(|own| !own.is_seed && own.devid == seed.devid);
        let is_older = |seed: &ScannedDevice| first.generation.is_none_or(|newest| seed.generation < Some(newest));
        let may_be_below = seeds.into_iter().filter(|seed| is_free(seed) && is_older(seed));
        let possible =
            |seed: ScannedDevice| PossibleSeed { path: seed.path, devid: DevId(seed.devid), uuid: seed.uuid };
        members.seeds.extend(may_be_below.map(possible));
    }
    Ok(members)
}

/// Whether a device of this generation missed changes (I5).
fn is_behind(generation: u64, newest: u64) -> bool {
    generation.saturating_add(1) < newest
}

/// The error for two seed devices that a filesystem could use (I4).
pub fn ambiguous_seeds(one: &PossibleSeed, other: &PossibleSeed) -> io::Error {
    are_both([&one.path, &other.path], &format!("seed device {} with UUID {}", one.devid, one.uuid))
}

/// Whether a path is a device of a seed filesystem, which is never written.
pub fn is_seed(path: &Path) -> bool {
    ScannedDevice::of(path, OFlags::empty()).is_some_and(|member| member.is_seed)
}

/// The error for two devices with the same device id (I4).
fn ambiguous(one: &ScannedDevice, other: &ScannedDevice) -> io::Error {
    are_both([&one.path, &other.path], &format!("device {} of the filesystem {}", other.devid, other.fsid))
}

/// The error for two paths to one device, of which nobody can tell the right one.
fn are_both(paths: [&Path; 2], what: &str) -> io::Error {
    let [one, other] = paths.map(|path| escaped(path.as_os_str().as_encoded_bytes()));
    let advice = "name the right one with -o device=, or move the copy elsewhere";
    io::Error::new(io::ErrorKind::AlreadyExists, format!("{one} and {other} are both {what}; {advice}"))
}

/// The error for a given device in whose place another one is (I7).
fn replaced(old: &ScannedDevice, new: &ScannedDevice) -> io::Error {
    let [old, new] = [old, new].map(|member| escaped(member.path.as_os_str().as_encoded_bytes()));
    io::Error::new(io::ErrorKind::AlreadyExists, format!("{new} is in the place of {old} by now; name {new}"))
}

#[derive(Clone, PartialEq, Eq)]
enum DeviceIdentity {
    Block(u64),
    File(u64, u64),
    /// The identity of an export.
    Export(String),
}

/// A device with a superblock.
struct ScannedDevice {
    path: PathBuf,
    is_block: bool,
    /// What tells devices apart (I6): `st_rdev` of a block device, `st_dev` and `st_ino` of a file.
    place: DeviceIdentity,
    owner: u32,
    fsid: Uuid,
    devid: u64,
    uuid: Uuid,
    nr_devices: u64,
    /// The generation of the newest valid superblock; `None` if no copy is valid.
    generation: Option<u64>,
    /// Whether its filesystem is a seed.
    is_seed: bool,
    /// The generation of its device item: since then, it is this device of the filesystem.
    since: u64,
}

impl ScannedDevice {
    /// Reads the superblock. `None` for everything that is no device of a filesystem. Does not wait for the writer of a
    /// pipe.
    fn of(path: &Path, flags: OFlags) -> Option<Self> {
        if is_url(path) {
            return probe(path, |client| {
                let place = DeviceIdentity::Export(client.identity().to_owned());
                let read = |raw: &mut [u8], offset| client.read(offset, &mut [IoSliceMut::new(raw)]);
                Self::of_superblock(path, (false, NOBODY), place, &read)
            });
        }
        let bits = i32::try_from((flags | OFlags::NONBLOCK).bits()).ok()?;
        let file = File::options().read(true).custom_flags(bits).open(path).ok()?;
        let metadata = file.metadata().ok()?;
        let is_block = metadata.file_type().is_block_device();
        if !is_block && !metadata.is_file() {
            return None;
        }
        let place = match is_block {
            true => loop_file(metadata.rdev())
                .map_or(DeviceIdentity::Block(metadata.rdev()), |(dev, ino)| DeviceIdentity::File(dev, ino)),
            false => DeviceIdentity::File(metadata.dev(), metadata.ino()),
        };
        let read = |raw: &mut [u8], offset| file.read_exact_at(raw, offset);
        Self::of_superblock(path, (is_block, metadata.uid()), place, &read)
    }

    /// Makes the device from its superblock, which `read` reads from an offset. The owner does not count for a block device.
    fn of_superblock(
        path: &Path,
        (is_block, owner): (bool, u32),
        place: DeviceIdentity,
        read: &dyn Fn(&mut [u8], u64) -> io::Result<()>,
    ) -> Option<Self> {
        let copy = |offset: &u64| {
            let mut raw = vec![0; SUPERBLOCK_SIZE];
            read(&mut raw, *offset).ok()?;
            let superblock = Superblock::decode(&raw).ok().filter(|superblock| superblock.magic == MAGIC)?;
            let is_valid = superblock.bytenr == *offset && check_superblock(&superblock, &raw).is_ok();
            Some((superblock, is_valid))
        };
        let [primary, mirrors @ ..] = &SUPERBLOCK_OFFSETS;
        let (mut superblock, mut is_valid) = copy(primary)?;
        if !is_valid {
            let valid =
                mirrors.iter().filter_map(copy).filter(|(other, is_valid)| *is_valid && other.fsid == superblock.fsid);
            if let Some((newest, _)) = valid.max_by_key(|(other, _)| other.generation) {
                (superblock, is_valid) = (newest, true);
            }
        }
        Some(Self {
            path: path.to_owned(),
            is_block,
            place,
            owner,
            fsid: superblock.fsid,
            devid: superblock.dev_item.devid.0,
            uuid: superblock.dev_item.uuid,
            nr_devices: superblock.num_devices,
            generation: is_valid.then_some(superblock.generation.0),
            is_seed: is_valid && superblock.flags & flags::SEEDING != 0,
            since: if is_valid { superblock.dev_item.generation } else { 0 },
        })
    }

    /// Whether this device has the id of another one since a later time (I7).
    fn is_in_place_of(&self, other: &Self) -> bool {
        self.generation.is_some() && other.generation.is_some_and(|generation| generation < self.since)
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
    let mut all: Vec<PathBuf> = beside.collect();
    all.sort_unstable();
    // Files come first (I6).
    all.extend(block_devices());
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
    use ubtrfs_format::codec::Field;
    use ubtrfs_format::item::{BlockGroupFlags, ChunkItem, Stripe};
    use ubtrfs_format::{DevId, Generation, Key, KeyType, Logical, Physical};

    use super::*;

    /// Writes the superblock of a device of a filesystem with three devices. It is not valid.
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

    /// Writes the valid superblock of a device of a filesystem with three devices.
    fn aged(dir: &Path, name: &str, devid: u64, generation: u64) -> PathBuf {
        let path = dir.join(name);
        let fsid = Uuid::from_u128(7);
        let chunk = ChunkItem {
            length: 4 << 20,
            owner: 2,
            stripe_len: 65536,
            flags: BlockGroupFlags::SYSTEM,
            io_align: 65536,
            io_width: 65536,
            sector_size: 4096,
            sub_stripes: 1,
            stripes: vec![Stripe { devid: DevId(1), offset: Physical(1 << 20), dev_uuid: Uuid::from_u128(1) }],
        };
        let mut array = Vec::new();
        Key::new(256, KeyType::CHUNK_ITEM, 22 << 20).write(&mut array);
        array.extend_from_slice(&chunk.encode());
        let mut superblock = Superblock::decode(&[0; SUPERBLOCK_SIZE]).expect("long enough");
        superblock.magic = MAGIC;
        superblock.bytenr = SUPERBLOCK_OFFSETS[0];
        (superblock.fsid, superblock.dev_item.fsid) = (fsid, fsid);
        superblock.generation = Generation(generation);
        superblock.num_devices = 3;
        superblock.dev_item.devid.0 = devid;
        (superblock.sectorsize, superblock.stripesize) = (4096, 4096);
        (superblock.nodesize, superblock.leafsize) = (16384, 16384);
        superblock.bytes_used = 6 * 16384;
        (superblock.root, superblock.chunk_root) = (Logical(23 << 20), Logical(22 << 20));
        superblock.sys_chunk_array[..array.len()].copy_from_slice(&array);
        superblock.sys_chunk_array_size = u32::try_from(array.len()).expect("short");
        let mut raw = vec![0; 65536];
        raw.extend(superblock.encode_with_csum());
        let own = Superblock::decode(&raw[65536..]).expect("long enough");
        check_superblock(&own, &raw[65536..]).expect("the test needs a valid superblock");
        std::fs::write(&path, raw).expect("a scratch file");
        path
    }

    #[test]
    fn i9_only_seeds_that_are_older_and_have_free_device_ids_are_possible() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let top = aged(dir.path(), "top", 2, 20);
        let seed = |name: &str, devid: u64, generation: u64| {
            let path = aged(dir.path(), name, devid, generation);
            let mut raw = std::fs::read(&path).expect("a scratch file");
            let mut superblock = Superblock::decode(&raw[65536..]).expect("long enough");
            superblock.fsid = Uuid::from_u128(50 + u128::from(devid));
            superblock.dev_item.fsid = superblock.fsid;
            superblock.flags |= flags::SEEDING;
            raw.truncate(65536);
            raw.extend(superblock.encode_with_csum());
            std::fs::write(&path, raw).expect("a scratch file");
            path
        };
        let own = seed("own", 1, 9);
        seed("taken id", 2, 9);
        seed("newer", 1, 21);
        let members = find_members(&[&top]).expect("no copies");
        let seeds: Vec<PathBuf> = members.seeds.into_iter().map(|seed| seed.path).collect();
        assert_eq!((members.found, seeds), (vec![], vec![own]));
    }

    #[test]
    fn i5_a_device_that_missed_changes_is_found_only_by_name() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let newest = aged(dir.path(), "a", 1, 20);
        let stale = aged(dir.path(), "b", 2, 18);
        let late = aged(dir.path(), "c", 3, 19);
        let members = find_members(&[&newest]).expect("no copies");
        assert_eq!(members.found, std::slice::from_ref(&late), "a power cut explains one generation");
        let text = members.left_out.iter().map(ToString::to_string).collect::<String>();
        for word in ["b is not used", "generation 18", "newest is 20", "-o device=", "-o degraded"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        let members = find_members(&[&stale]).expect("no copies");
        assert_eq!((members.found, members.left_out), (vec![newest.clone(), late], vec![]));
        // Of two stale devices, the one that is not named is left out.
        let other = aged(dir.path(), "c", 3, 7);
        let members = find_members(&[&stale]).expect("no copies");
        assert_eq!(members.found, [newest]);
        assert_eq!(members.left_out, [MissedChanges { path: other, generation: 7, newest: 20 }]);
    }

    #[test]
    fn i10_a_removed_device_hides_no_other_and_is_not_mentioned() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let newest = aged(dir.path(), "a", 1, 20);
        let removed = aged(dir.path(), "b", 2, 9);
        let others = [aged(dir.path(), "c", 3, 20), aged(dir.path(), "d", 4, 20)];
        for given in [&[newest.as_path()][..], &[&removed], &[&newest, &removed], &[&removed, &newest, &others[0]]] {
            let members = find_members(given).expect("no copies");
            let expected: Vec<&PathBuf> =
                [&newest].into_iter().chain(&others).filter(|path| !given.contains(&path.as_path())).collect();
            assert_eq!(members.found.iter().collect::<Vec<_>>(), expected, "{given:?}");
            assert_eq!(members.left_out, [], "{given:?}");
        }
    }

    #[test]
    fn i4_a_backup_does_not_count_beside_the_device_that_has_everything() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let first = aged(dir.path(), "a", 1, 20);
        let second = aged(dir.path(), "b", 2, 20);
        let backup = aged(dir.path(), "b backup", 2, 12);
        device(dir.path(), "b broken", 2, 7);
        let members = find_members(&[&first]).expect("one of them counts");
        assert_eq!((members.found, members.left_out), (vec![second.clone()], vec![]));
        // Nobody judges between copies if the given device is an old one.
        aged(dir.path(), "a", 1, 12);
        let error = find_members(&[&first]).expect_err("two devices 2").to_string();
        assert!(error.contains("both device 2"), "{error}");
        // Two backups, and no device.
        std::fs::rename(&second, dir.path().join("b older")).expect("a scratch file");
        aged(dir.path(), "a", 1, 20);
        aged(dir.path(), "b older", 2, 11);
        std::fs::remove_file(dir.path().join("b broken")).expect("a scratch file");
        let members = find_members(&[&first]).expect("both are left out");
        let left_out: Vec<&PathBuf> = members.left_out.iter().map(|device| &device.path).collect();
        assert_eq!((members.found, left_out), (vec![], vec![&backup, &dir.path().join("b older")]));
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
        let find = |given: &[&Path]| find_members(given).map(|members| members.found);
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
        assert_eq!(
            find_members(&[&first]).expect("no copies").found,
            Vec::<PathBuf>::new(),
            "I3: a file of another user"
        );
        assert_eq!(find_members(&[&second]).expect("no copies").found, Vec::<PathBuf>::new(), "I3: a file of root");
        std::os::unix::fs::chown(&first, Some(65534), None).expect("root gives it away");
        assert_eq!(find_members(&[&first]).expect("no copies").found, std::slice::from_ref(&second));
    }

    #[test]
    fn a_device_in_whose_place_another_one_is_is_not_found() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let since = |name: &str, devid, generation, since| {
            let path = aged(dir.path(), name, devid, generation);
            let file = File::options().read(true).write(true).open(&path).expect("just made");
            let mut raw = vec![0; SUPERBLOCK_SIZE];
            file.read_exact_at(&mut raw, SUPERBLOCK_OFFSETS[0]).expect("long enough");
            let mut superblock = Superblock::decode(&raw).expect("just made");
            superblock.dev_item.generation = since;
            file.write_all_at(&superblock.encode_with_csum(), SUPERBLOCK_OFFSETS[0]).expect("a scratch file");
            path
        };
        let first = since("a", 1, 20, 0);
        let old = since("b", 2, 19, 0);
        let new = since("c", 2, 20, 20);
        // It is being added: its superblock is older than its item.
        let added = since("d", 3, 19, 20);
        assert_eq!(find_members(&[&first]).expect("one device 2").found, [new.clone(), added.clone()]);
        assert_eq!(find_members(&[&first, &new]).expect("named").found, std::slice::from_ref(&added));
        let error = find_members(&[&old]).map(drop).expect_err("it was replaced").to_string();
        assert!(error.contains("c is in the place of"), "{error}");
    }

    #[test]
    fn a_pipe_without_a_writer_is_no_device() {
        let dir = tempfile::tempdir().expect("a scratch directory");
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.expect("coreutils has it").success());
        assert_eq!(find_members(&[&pipe]).expect("not a device").found, Vec::<PathBuf>::new());
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
        assert_eq!(find_members(&[&first, &second]).expect("named").found, Vec::<PathBuf>::new());
    }
}
