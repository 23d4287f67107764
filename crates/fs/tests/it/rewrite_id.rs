//! Tests the change of a filesystem's id in all tree blocks, interrupted at every write.
//!
//! Method: the writes of a change are recorded. After a power cut at each point, the filesystem is as before, or no program
//! opens it and the same call completes the change. Then the content is whole, and the checker finds nothing: it reads each
//! copy of each tree block.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_error::Error;
use ubtrfs_format::RootId;
use ubtrfs_format::item::BlockGroupFlags;
use ubtrfs_fs::{Fs, Job, MountOptions, rewrite_id};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{Medium, MediumDevice, RecordingDevice, Rng, ubtrfs_check_errors};
use uuid::Uuid;

use super::arrays::{content, get, put};
use super::seeds::is_same;

const MIB: u64 = 1 << 20;
const NEW: Uuid = Uuid::from_u128(0x1234_5678_9abc_def0);

/// Makes a filesystem with files on this number of devices. Returns the media and the id.
fn made(nr_devices: usize) -> (Vec<Medium>, Uuid) {
    let media: Vec<_> = (0..nr_devices).map(|_| Arc::new(MediumDevice::new(Medium::zeros(200 * MIB)))).collect();
    let profile = if nr_devices > 1 { BlockGroupFlags::RAID1 } else { BlockGroupFlags::DUP };
    let options = MkfsOptions { metadata_profile: profile, ..MkfsOptions::default() };
    let targets: Vec<&dyn Device> = media.iter().map(|device| device.as_ref() as &dyn Device).collect();
    ubtrfs_mkfs::make_array(&targets, &options).unwrap();
    let fs = opened(&devices(&media));
    for nr in 0..300 {
        put(&fs, &format!("file{nr}"), &content(5000, nr));
    }
    put(&fs, "big", &content(2 * MIB, 7));
    fs.close().unwrap();
    let id = fs.superblock().fsid;
    (media.iter().map(|device| device.content()).collect(), id)
}

fn devices<D: Device + 'static>(all: &[Arc<D>]) -> Vec<Arc<dyn Device>> {
    all.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect()
}

fn opened(all: &[Arc<dyn Device>]) -> Arc<Fs> {
    Fs::open(all.to_vec(), MountOptions::default()).unwrap()
}

/// Checks that the filesystem is whole and has this id, in its device items too.
fn check(all: &[Arc<dyn Device>], id: Uuid, when: &str) {
    let fs = opened(all);
    assert_eq!(fs.read_only(), None, "{when}");
    let superblock = fs.superblock();
    assert_eq!((superblock.fsid, superblock.node_fsid(), superblock.dev_item.fsid), (id, id, id), "{when}");
    assert!(get(&fs, "big", 2 * MIB) == content(2 * MIB, 7), "{when}");
    fs.close().unwrap();
    drop(fs);
    let problems = ubtrfs_check_errors(all.to_vec()).unwrap();
    assert!(problems.is_empty(), "{when}: {problems:?}");
}

#[test]
fn a_change_of_the_id_is_completed_after_a_cut_at_any_write() {
    for nr_devices in [1, 2] {
        let (media, old) = made(nr_devices);
        let recorded: Vec<_> = match nr_devices {
            1 => vec![Arc::new(RecordingDevice::new(media[0].clone()))],
            _ => RecordingDevice::array(media).into_iter().map(Arc::new).collect(),
        };
        assert_eq!(rewrite_id(&devices(&recorded), Some(NEW), &Job::new()).unwrap(), NEW);
        let (mut rng, mut cuts) = (Rng::new(Rng::seed_or(1)), recorded[0].cuts());
        let (mut nr_old, mut nr_interrupted) = (0, 0);
        for point in 0..=recorded[0].events() {
            let when = format!("{nr_devices} devices, after {point} events");
            let (after, _) = cuts.cut_all(point, &mut rng);
            let after: Vec<_> = after.into_iter().map(|medium| Arc::new(MediumDevice::new(medium))).collect();
            let all = devices(&after);
            match Fs::open(all.clone(), MountOptions::default()) {
                Ok(fs) => {
                    let id = fs.superblock().fsid;
                    fs.close().unwrap();
                    drop(fs);
                    nr_old += u32::from(id == old);
                    check(&all, id, &when);
                }
                Err(error) => {
                    nr_interrupted += 1;
                    let refused = rewrite_id(&all, Some(Uuid::from_u128(5)), &Job::new());
                    assert!(matches!(refused, Err(Error::Refused { .. })), "{when}: {refused:?} after {error}");
                    assert_eq!(rewrite_id(&all, None, &Job::new()).unwrap(), NEW, "{when}");
                    check(&all, NEW, &when);
                }
            }
        }
        assert!(nr_old > 0 && nr_interrupted > 10, "{nr_old} old, {nr_interrupted} interrupted");
        check(&devices(&recorded), NEW, "in the end");
    }
}

#[test]
fn a_damaged_tree_block_is_found_before_anything_is_written() {
    let (media, _) = made(1);
    for nr_damaged in [1, 2] {
        let device = Arc::new(MediumDevice::new(media[0].clone()));
        damage(&device, nr_damaged);
        let before = device.content();
        let done = rewrite_id(&devices(&[Arc::clone(&device)]), Some(NEW), &Job::new());
        match nr_damaged {
            1 => assert!(matches!(&done, Err(Error::Refused { hint, .. }) if hint.contains("scrub")), "{done:?}"),
            _ => assert!(matches!(done, Err(Error::Corrupt(_))), "{done:?}"),
        }
        assert!(is_same(&device.content(), &before), "something was written");
    }
}

/// Damages this many copies of a leaf of the subvolume.
fn damage(device: &MediumDevice, nr_copies: usize) {
    const NODE: usize = 16 << 10;
    let medium = device.content();
    let mut node = vec![0; NODE];
    let mut found: Vec<((u64, u64), u64)> = Vec::new();
    for at in (MIB..200 * MIB).step_by(NODE) {
        medium.read(at, &mut node);
        let view = ubtrfs_format::node::NodeView::new(&node).unwrap();
        if view.owner() == RootId::FS_TREE && view.is_leaf() && view.nritems() > 0 {
            found.push(((view.generation().0, view.bytenr().0), at));
        }
    }
    // Blocks that are not in use any more lie there, too. Those of the last commit are in use.
    let newest = found.iter().map(|(block, _)| *block).max().unwrap();
    let copies: Vec<u64> = found.iter().filter(|(block, _)| *block == newest).map(|(_, at)| *at).collect();
    assert_eq!(copies.len(), 2, "{found:?}");
    for at in copies.into_iter().take(nr_copies) {
        medium.read(at, &mut node);
        node[NODE - 1] ^= 1;
        device.write_at(at, &node).unwrap();
    }
}
