//! Tests replacements of devices that are interrupted, and resumed by us or by Linux.
//!
//! Method: a replacement of the first device of an array is interrupted, by the end of the session or as by a power cut: the
//! images are copied while it runs. The images are opened again, with and without the new device.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ubtrfs_device::Device;
use ubtrfs_format::DevId;
use ubtrfs_format::item::{BalanceArgs, BalanceFilters, BalanceFlags, BalanceItem, DevReplaceItem};
use ubtrfs_fs::{Fs, Job, MountOptions, ReplaceRequest};
use ubtrfs_mkfs::{MkfsOptions, make_array};
use ubtrfs_testkit::{LoopMount, Medium, MediumDevice, capability, run};

use super::arrays::{Array, content, get, open_device, put};
use super::devices::{add, devids, fill, is_btrfs, judge, verify};

const MIB: u64 = 1 << 20;
const BIG: u64 = 300 * MIB;

/// How a replacement is interrupted.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Close,
    PowerCut,
    Linux,
}

/// An array of which the first device is being replaced by the last one, by `by`.
fn interrupted(args: (&str, &str, usize), by: By) -> Array {
    let (data, metadata, nr_devices) = args;
    for round in 0..20 {
        let mut array = Array::new(&["-d", data, "-m", metadata], &vec![900; nr_devices]);
        let fs = array.open_some(&(0..nr_devices).collect::<Vec<_>>(), "commit=300");
        put(&fs, "huge", &content(BIG, 7));
        fill(&fs, 1);
        fs.sync().unwrap();
        if by == By::Linux {
            fs.close().unwrap();
            drop(fs);
            array.add_image(900);
            array.suspend_replacement();
            if array.images.iter().all(|image| is_btrfs(image)) && state(&array).is_unfinished() {
                return array;
            }
            eprintln!("{round}: it was complete, or suspended before the new device got a superblock");
            continue;
        }
        let image = array.add_image(900);
        let request = ReplaceRequest { devid: DevId(1), device: open_device(&image), avoids_source: false };
        let mut copies = Vec::new();
        let result = std::thread::scope(|scope| {
            let replacing = scope.spawn(|| fs.replace_device(&request, &Job::new()));
            while fs.replace_status().is_none_or(|status| status.done_bytes.0 == 0) && !replacing.is_finished() {
                std::thread::yield_now();
            }
            fs.limit_replace(MIB);
            put(&fs, "meanwhile", &content(MIB, 8));
            // This stores how far it is.
            fs.sync().unwrap();
            match by {
                By::PowerCut => {
                    let before = fs.superblock().generation;
                    copies = copy(&array);
                    if fs.superblock().generation != before {
                        // The copies are of different commits.
                        copies.clear();
                    }
                    fs.limit_replace(0);
                }
                _ => fs.suspend_replace(),
            }
            replacing.join().unwrap()
        });
        assert_eq!(result.is_ok(), by == By::PowerCut, "{result:?}");
        drop(request);
        fs.close().unwrap();
        drop(fs);
        for (copy, image) in copies.iter().zip(&array.images) {
            std::fs::rename(copy, image).unwrap();
        }
        let was_complete = by == By::PowerCut && copies.is_empty();
        if !was_complete && state(&array).is_unfinished() {
            return array;
        }
        eprintln!("{round}: it was complete before");
    }
    panic!("no replacement is interrupted");
}

fn copy(array: &Array) -> Vec<PathBuf> {
    let copied = |image: &PathBuf| {
        let copy = image.with_extension("copy");
        run("cp", ["--sparse=always".as_ref(), image.as_os_str(), copy.as_os_str()]).unwrap();
        copy
    };
    array.images.iter().map(copied).collect()
}

/// The state of the replacement as the trees have it.
fn state(array: &Array) -> DevReplaceItem {
    let options = MountOptions::parse("ro").unwrap();
    let fs = Fs::open(array.images.iter().map(|image| open_device(image)).collect(), options).unwrap();
    let item = fs.last_replacement().unwrap().expect("there was one");
    fs.close().unwrap();
    item
}

fn verify_all(fs: &Fs) {
    assert!(get(fs, "huge", BIG) == content(BIG, 7));
    verify(fs, 1);
}

const ARRAYS: [(&str, &str, usize); 4] =
    [("single", "dup", 1), ("raid1", "raid1", 2), ("raid0", "raid1", 2), ("raid10", "raid10", 4)];

#[test]
fn an_interrupted_replacement_goes_on() {
    if !capability::kernel_oracle() {
        return;
    }
    for by in [By::Close, By::PowerCut, By::Linux] {
        for kind in ARRAYS {
            eprintln!("{by:?} {kind:?}");
            let mut array = interrupted(kind, by);
            let before = state(&array);
            if by != By::Linux {
                assert_eq!(before.replace_state == DevReplaceItem::SUSPENDED, by == By::Close);
            }
            let fs = array.open();
            assert_eq!(fs.read_only(), None);
            if by == By::Close {
                // It is refused until the replacement goes on, and then waits for that.
                let new = array.add_image(300);
                let begun = Instant::now();
                while let Err(error) = fs.add_device(open_device(&new), &Job::new()) {
                    assert!(error.to_string().contains("is not complete"), "{error}");
                    assert!(begun.elapsed() < Duration::from_secs(60), "the replacement does not go on");
                    std::thread::sleep(Duration::from_millis(10));
                }
                array.images.pop();
            }
            fill(&fs, 2);
            fs.wait_for_replace();
            assert!(fs.replace_status().is_none() && fs.suspended_replacement().is_none());
            let last = fs.last_replacement().unwrap().unwrap();
            assert_eq!(last.replace_state, DevReplaceItem::FINISHED);
            assert_eq!(last.time_started, before.time_started);
            verify_all(&fs);
            if by == By::Close {
                fs.remove_devices(&[DevId(kind.2 as u64 + 1)], &Job::new()).unwrap();
            }
            assert_eq!(devids(&fs), (1..=kind.2 as u64).collect::<Vec<_>>());
            fs.close().unwrap();
            drop(fs);
            let old = array.images.remove(0);
            assert!(!is_btrfs(&old), "its superblocks are wiped");
            judge(&array, &[1, 2]);
        }
    }
}

#[test]
fn linux_goes_on_with_a_replacement_that_we_began() {
    if !capability::kernel_oracle() {
        return;
    }
    for by in [By::Close, By::PowerCut] {
        // Linux does not find the new device of a filesystem with one device, not even of its own.
        for kind in &ARRAYS[1..] {
            eprintln!("{by:?} {kind:?}");
            let mut array = interrupted(*kind, by);
            let before = state(&array);
            let mount = LoopMount::array(&array.images, "").unwrap();
            let status = || run("btrfs", ["replace", "status", "-1", mount.path().to_str().unwrap()]).unwrap();
            while !status().contains("finished") {
                assert!(status().contains("% done") || status().contains("finished"), "{}", status());
                std::thread::sleep(Duration::from_millis(20));
            }
            assert!(std::fs::read(mount.join("huge")).unwrap() == content(BIG, 7));
            mount.scrub().unwrap();
            assert!(mount.kernel_complaints().is_empty(), "{:?}", mount.kernel_complaints());
            mount.close().unwrap();
            array.images.remove(0);
            judge(&array, &[1]);
            let last = state(&array);
            assert_eq!((last.replace_state, last.time_started), (DevReplaceItem::FINISHED, before.time_started));
            let fs = array.open();
            verify_all(&fs);
            fs.close().unwrap();
        }
    }
}

#[test]
fn a_replacement_without_its_new_device_is_suspended() {
    if !capability::kernel_oracle() {
        return;
    }
    for by in [By::PowerCut, By::Linux] {
        for kind in [ARRAYS[0], ARRAYS[1]] {
            eprintln!("{by:?} {kind:?}");
            let mut array = interrupted(kind, by);
            let members: Vec<usize> = (0..kind.2).collect();
            let fs = array.open_some(&members, "");
            assert_eq!(fs.read_only(), None);
            assert!(fs.suspended_replacement().is_some_and(|suspended| !suspended.has_target));
            let spare = array.add_image(300);
            let error = fs.add_device(open_device(&spare), &Job::new()).unwrap_err().to_string();
            assert!(error.contains("replacement of device 1 is not complete"), "{error}");
            array.images.pop();
            fill(&fs, 2);
            fs.close().unwrap();
            drop(fs);
            // The new device missed writes, so the cursor is 0.
            let item = state(&array);
            assert_eq!((item.replace_state, item.cursor_left), (DevReplaceItem::SUSPENDED, 0));
            let fs = array.open();
            fs.wait_for_replace();
            assert_eq!(fs.last_replacement().unwrap().unwrap().replace_state, DevReplaceItem::FINISHED);
            (1..=2).for_each(|seed| verify(&fs, seed));
            fs.close().unwrap();
            drop(fs);
            array.images.remove(0);
            judge(&array, &[1, 2]);
        }
    }
}

/// The new device has a superblock of the last commit's generation. Linux does not replay a log of that generation that only
/// the other devices have.
#[test]
fn what_is_fsynced_without_the_new_device_is_there_with_it() {
    if !capability::kernel_oracle() {
        return;
    }
    for kind in [ARRAYS[1], ARRAYS[2]] {
        eprintln!("{kind:?}");
        let array = interrupted(kind, By::PowerCut);
        let fs = array.open_some(&(0..kind.2).collect::<Vec<_>>(), "commit=300");
        put(&fs, "fsynced", &content(MIB, 9));
        fs.fsync(fs.lookup_path(b"/fsynced", true).unwrap().id, false).unwrap();
        let copies = copy(&array);
        fs.close().unwrap();
        drop(fs);
        for (copy, image) in copies.iter().zip(&array.images) {
            std::fs::rename(copy, image).unwrap();
        }
        let devices = array.images.iter().map(|image| open_device(image)).collect();
        let fs = Fs::open(devices, MountOptions::parse("ro").unwrap()).unwrap();
        assert!(get(&fs, "fsynced", MIB) == content(MIB, 9), "here");
        fs.close().unwrap();
        drop(fs);
        let mount = LoopMount::array(&array.images, "").unwrap();
        assert!(std::fs::read(mount.join("fsynced")).unwrap() == content(MIB, 9), "in Linux");
        mount.close().unwrap();
    }
}

#[test]
fn a_resumed_replacement_can_be_cancelled_also_without_its_new_device() {
    if !capability::kernel_oracle() {
        return;
    }
    for by in [By::Close, By::Linux] {
        for has_target in [true, false] {
            eprintln!("{by:?} {has_target}");
            let kind = ARRAYS[1];
            let mut array = interrupted(kind, by);
            let fs = match has_target {
                true => array.open(),
                false => array.open_some(&[0, 1], ""),
            };
            match fs.cancel_replace() {
                Ok(()) => {}
                Err(error) => {
                    assert!(has_target, "{error}");
                    eprintln!("it was complete before");
                    continue;
                }
            }
            assert_eq!(fs.last_replacement().unwrap().unwrap().replace_state, DevReplaceItem::CANCELED);
            assert!(fs.cancel_replace().is_err() && fs.suspended_replacement().is_none());
            add(&fs, &array.add_image(300));
            fill(&fs, 2);
            fs.close().unwrap();
            drop(fs);
            let new = array.images.remove(2);
            assert_eq!(is_btrfs(&new), !has_target);
            judge(&array, &[1, 2]);
            if has_target {
                continue;
            }
            // A new device whose replacement has ended is left out.
            array.images.push(new);
            let fs = array.open();
            assert_eq!((fs.read_only(), devids(&fs)), (None, vec![1, 2, 3]));
            (1..=2).for_each(|seed| verify(&fs, seed));
            fs.close().unwrap();
        }
    }
}

#[test]
fn a_source_that_is_lost_meanwhile_is_not_needed() {
    if !capability::kernel_oracle() {
        return;
    }
    for by in [By::Close, By::Linux] {
        let mut array = interrupted(ARRAYS[1], by);
        array.images.remove(0);
        let fs: Arc<Fs> = array.open_some(&[0, 1], "degraded");
        assert_eq!(fs.read_only(), None);
        fill(&fs, 2);
        fs.wait_for_replace();
        assert_eq!(fs.last_replacement().unwrap().unwrap().replace_state, DevReplaceItem::FINISHED);
        verify_all(&fs);
        fs.close().unwrap();
        drop(fs);
        judge(&array, &[1, 2]);
    }
}

/// A balance of everything.
fn whole_balance() -> BalanceItem {
    let args = BalanceArgs { flags: BalanceFilters::empty().bits(), ..BalanceArgs::NONE };
    let flags = (BalanceFlags::DATA | BalanceFlags::METADATA).bits();
    BalanceItem { flags, data: args.clone(), metadata: args.clone(), system: args, unused: [0; 4] }
}

/// After a power cut amid both, Linux would continue the balance alone, and suspend the replacement.
#[test]
fn a_balance_and_a_replacement_exclude_each_other() {
    let blank = || Arc::new(MediumDevice::new(Medium::zeros(512 << 20)));
    let devices = [blank(), blank()];
    let raid1 = ubtrfs_format::Profile::named("raid1").unwrap().flag;
    let refs: Vec<&dyn Device> = devices.iter().map(|device| &**device as &dyn Device).collect();
    let options = MkfsOptions { data_profile: raid1, metadata_profile: raid1, ..MkfsOptions::default() };
    make_array(&refs, &options).unwrap();
    let given: Vec<Arc<dyn Device>> = devices.iter().map(|device| Arc::clone(device) as _).collect();
    let fs = Fs::open(given, MountOptions::default()).unwrap();
    put(&fs, "big", &content(40 * MIB, 1));
    fs.sync().unwrap();
    let request = || ReplaceRequest { devid: DevId(1), device: blank(), avoids_source: false };
    let refused = |words: &str| {
        let error = fs.replace_device(&request(), &Job::new()).unwrap_err();
        assert_eq!(error.errno(), rustix::io::Errno::INPROGRESS.raw_os_error());
        assert!(error.to_string().contains(words), "{error}");
    };

    let is_paused = (0..1000).any(|_| {
        std::thread::scope(|scope| {
            let running = scope.spawn(|| fs.balance(whole_balance(), &Job::new()));
            while fs.pause_balance().is_err() && !running.is_finished() {}
            let _ = running.join().unwrap();
        });
        fs.balance_status().is_some()
    });
    assert!(is_paused, "no balance could be paused");
    refused("a balance is paused; let it go on and wait for its end (ubtrfs balance resume), or end it");
    assert!(fs.replace_status().is_none() && fs.last_replacement().unwrap().is_none(), "nothing has begun");
    fs.cancel_balance().unwrap();

    // Of a thread that balances again and again, and one that replaces again and again, only one gets on at a time.
    let (mut nr_replaced, mut nr_balanced, mut nr_refused) = (0, 0, [0, 0]);
    std::thread::scope(|scope| {
        let balancing = scope.spawn(|| {
            let (mut balanced, mut refused) = (0, 0);
            while balanced < 5 {
                match fs.balance(whole_balance(), &Job::new()) {
                    Ok(_) => balanced += 1,
                    Err(error) => {
                        let text = error.to_string();
                        assert!(text.contains("a device is being replaced; wait for the end"), "{text}");
                        refused += 1;
                        std::thread::sleep(Duration::from_micros(200));
                    }
                }
            }
            (balanced, refused)
        });
        while !balancing.is_finished() {
            match fs.replace_device(&request(), &Job::new()) {
                Ok(_) => nr_replaced += 1,
                Err(error) => {
                    assert!(error.to_string().contains("a balance is running; wait for its end"), "{error}");
                    nr_refused[0] += 1;
                }
            }
            // Otherwise the balance would hardly ever begin.
            std::thread::sleep(Duration::from_millis(1));
        }
        (nr_balanced, nr_refused[1]) = balancing.join().unwrap();
    });
    eprintln!("{nr_replaced} replacements, {nr_balanced} balances, {nr_refused:?} refused");
    assert!(nr_balanced == 5 && nr_refused[0] + nr_refused[1] > 0);
    assert!(get(&fs, "big", 40 * MIB) == content(40 * MIB, 1));
    fs.close().unwrap();
}
