//! Power cuts of arrays, with lost, stale and noisy devices. Method: see `threads::arrays`. The example `array_cuts` runs
//! many more. `UBTRFS_ARRAY_CUTS=N` runs N seeds here.

use std::sync::Arc;

use ubtrfs_device::Device;
use ubtrfs_format::Profile;
use ubtrfs_fs::MountOptions;
use ubtrfs_mkfs::{MkfsOptions, make_array};
use ubtrfs_testkit::array::{FaultyMember, MemberState};
use ubtrfs_testkit::{ArrayCuts, FsTarget, Medium, MediumDevice, MemberFaults, NodeKind, Target, capability};

fn verify(run: &ArrayCuts, cuts: usize) {
    let linux = capability::kernel_oracle();
    let mut builder = run.builder();
    for (number, point) in run.points(cuts).into_iter().enumerate() {
        let cut = run.cut(&mut builder, number, point);
        let found = run.verify(&cut).unwrap_or_else(|error| panic!("{error:#}"));
        if linux && number == cuts / 2 {
            let dir = tempfile::tempdir().unwrap();
            run.verify_by_linux(&cut, &found, dir.path()).unwrap_or_else(|error| panic!("{error:#}"));
        }
    }
}

fn skipped() {
    assert!(!capability::in_ci(), "CI must write arrays, and the engine opens them only for reading");
    eprintln!("SKIPPED: the engine opens arrays only for reading");
}

#[test]
fn one_device_keeps_every_promise() {
    for seed in [3, 20] {
        verify(&ArrayCuts::record_on("single", "dup", 1, seed).unwrap().unwrap(), 20);
    }
}

#[test]
fn arrays_keep_every_promise_after_a_cut_and_a_loss() {
    let nr_seeds = std::env::var("UBTRFS_ARRAY_CUTS").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    for seed in 0..nr_seeds {
        match ArrayCuts::record(seed).unwrap() {
            Some(run) => verify(&run, 12),
            None => return skipped(),
        }
    }
}

#[test]
fn devices_join_leave_and_are_replaced_amid_power_cuts() {
    let nr_seeds = std::env::var("UBTRFS_DEVICE_CUTS").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    for seed in 0..nr_seeds {
        match ArrayCuts::record_changing(seed).unwrap() {
            Some(run) => verify(&run, 12),
            None => return skipped(),
        }
    }
}

#[test]
fn arrays_are_converted_resized_and_scrubbed_amid_power_cuts() {
    let nr_seeds = std::env::var("UBTRFS_ARRAY_EVENTS").ok().and_then(|text| text.parse().ok()).unwrap_or(4);
    for seed in 0..nr_seeds {
        match ArrayCuts::record_eventful(seed).unwrap() {
            Some(run) => verify(&run, 12),
            None => return skipped(),
        }
    }
}

#[test]
fn a_member_that_fails_and_returns_stale_loses_nothing() {
    let nr_seeds = std::env::var("UBTRFS_MEMBER_FAULTS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    for seed in 0..nr_seeds {
        let Some(run) = MemberFaults::run(seed).unwrap_or_else(|error| panic!("{error:#}")) else {
            return skipped();
        };
        eprintln!("{}: hit {}", run.name, run.hit);
    }
}

/// The devices of a new array with one profile for data and metadata.
fn array(profile: &str, nr_devices: usize) -> Vec<Arc<MediumDevice>> {
    let devices: Vec<_> = (0..nr_devices).map(|_| Arc::new(MediumDevice::new(Medium::zeros(256 << 20)))).collect();
    let refs: Vec<&dyn Device> = devices.iter().map(|device| &**device as &dyn Device).collect();
    let flag = Profile::named(profile).unwrap().flag;
    make_array(&refs, &MkfsOptions { data_profile: flag, metadata_profile: flag, ..MkfsOptions::default() }).unwrap();
    devices
}

fn open(media: &[Medium], options: &str) -> FsTarget {
    let device = |medium: &Medium| Arc::new(MediumDevice::new(medium.clone())) as Arc<dyn Device>;
    FsTarget::on_devices(media.iter().map(device).collect(), MountOptions::parse(options).unwrap()).unwrap()
}

/// Opens the devices for writing. `None` if arrays can only be read.
fn open_for_writing<D: Device + 'static>(devices: &[Arc<D>]) -> Option<FsTarget> {
    let given = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    let target = FsTarget::on_devices(given, MountOptions::parse("commit=300").unwrap()).unwrap();
    if target.fs().read_only().is_some() {
        skipped();
        return None;
    }
    Some(target)
}

fn contents(devices: &[Arc<MediumDevice>]) -> Vec<Medium> {
    devices.iter().map(|device| device.content()).collect()
}

fn content_of(target: &FsTarget, path: &[u8]) -> Vec<u8> {
    let file = target.lookup(path).unwrap();
    target.fs().read(file.id, 0, file.size as usize).unwrap()
}

#[test]
fn an_fsync_survives_a_device_that_lost_it_and_the_loss_of_another() {
    let devices = array("raid1c3", 3);
    let Some(mut target) = open_for_writing(&devices) else { return };
    target.create(b"file", NodeKind::File, 0o644, (0, 0)).unwrap();
    target.sync().unwrap();
    target.write(b"file", 0, &[1; 5000]).unwrap();
    target.fsync(b"file").unwrap();
    let stale = contents(&devices);
    target.write(b"file", 0, &[2; 9000]).unwrap();
    target.fsync(b"file").unwrap();
    let newest = contents(&devices);
    drop(target);
    for media in [[stale[0].clone(), newest[1].clone()], [newest[1].clone(), stale[0].clone()]] {
        let target = open(&media, "degraded");
        assert!(content_of(&target, b"file") == [2; 9000], "the newer log of one generation counts");
    }
}

#[test]
fn a_device_that_loses_writes_stops_no_writer() {
    let media = array("raid1", 2);
    let members: Vec<_> = media.iter().map(|medium| Arc::new(FaultyMember::new(medium.clone(), None))).collect();
    let Some(mut target) = open_for_writing(&members) else { return };
    members[1].set(MemberState::LosesWrites);
    for number in 0..20 {
        let path = format!("file-{number}").into_bytes();
        target.create(&path, NodeKind::File, 0o644, (0, 0)).unwrap();
        target.write(&path, 0, &[number; 20_000]).unwrap();
        target.fsync(&path).unwrap();
        target.sync().unwrap();
    }
    target.close().unwrap();
    members[1].set(MemberState::Works);
    let target = open(&contents(&media), "");
    for number in 0..20 {
        assert!(content_of(&target, format!("file-{number}").as_bytes()) == [number; 20_000]);
    }
}
