//! Tests of `ubtrfs check` as a user runs it: exit status, output lines, JSON, and an unchanged image.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use ubtrfs_device::{Access, FileDevice};
use ubtrfs_mkfs::MkfsOptions;
use ubtrfs_testkit::{Corruption, Corruptor, Image, LoopMount, Rng, btrfs_check, capability};

fn check(args: &[&str], image: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ubtrfs")).arg("check").args(args).arg(image).output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn made() -> Image {
    let image = Image::empty(256 << 20).unwrap();
    let device = FileDevice::open(image.path(), Access::ReadWrite).unwrap();
    ubtrfs_mkfs::make(&device, &MkfsOptions::default()).unwrap();
    image
}

#[test]
fn a_whole_filesystem_is_clean_and_stays_as_it_was() {
    let image = made();
    let before = image.digest().unwrap();
    for args in [&[][..], &["--check-data-csum"]] {
        let output = check(args, image.path());
        let text = stdout(&output);
        assert_eq!(output.status.code(), Some(0), "{text}");
        assert!(text.lines().count() == 1 && text.ends_with(": clean\n"), "{text}");
        assert!(output.stderr.is_empty());
    }
    assert_eq!(before, image.digest().unwrap());
}

#[test]
fn an_array_is_made_and_checked_by_its_devices() {
    let dir = tempfile::tempdir().unwrap();
    let ubtrfs =
        |args: &[&str]| Command::new(env!("CARGO_BIN_EXE_ubtrfs")).args(args).current_dir(dir.path()).output().unwrap();
    let made = ubtrfs(&["mkfs", "-b", "256M", "-d", "raid0", "-m", "raid1c3", "a", "b", "c"]);
    let text = stdout(&made);
    assert!(made.status.success() && text.contains("Number of devices:  3"), "{text}");
    assert!(text.ends_with("    3   256.00MiB  c\n"), "{text}");
    let whole = ubtrfs(&["check", "c", "a", "b"]);
    assert!(whole.status.success() && stdout(&whole).ends_with(": clean\n"), "{}", stdout(&whole));
    // A device beside the others is found.
    assert!(ubtrfs(&["check", "a", "b"]).status.success());
    std::fs::create_dir(dir.path().join("away")).unwrap();
    std::fs::rename(dir.path().join("c"), dir.path().join("away/c")).unwrap();
    let degraded = ubtrfs(&["check", "a", "b"]);
    assert_eq!(degraded.status.code(), Some(1), "the data is striped");
    assert!(stdout(&degraded).starts_with("W-DEVICE-MISSING: tree 3 "), "{}", stdout(&degraded));
    for words in ["device 3 (uuid ", "E-CHUNK-LOST"] {
        assert!(stdout(&degraded).contains(words), "{words}: {}", stdout(&degraded));
    }
    // As for btrfs-progs, a missing mirror is a warning.
    assert!(ubtrfs(&["mkfs", "-q", "-b", "256M", "-d", "raid1", "-m", "raid1", "d", "e"]).status.success());
    std::fs::rename(dir.path().join("e"), dir.path().join("away/e")).unwrap();
    let degraded = ubtrfs(&["check", "d"]);
    assert!(degraded.status.success(), "{}", stdout(&degraded));
    assert!(stdout(&degraded).contains(": clean, with warnings (1 W-DEVICE-MISSING)"), "{}", stdout(&degraded));
}

#[test]
fn each_problem_is_a_line_with_its_code() {
    if !capability::program("btrfs") {
        return;
    }
    let image = made();
    let corruptor = Corruptor::new(&image).unwrap();
    corruptor.apply(Corruption::DevItemUsed, &mut Rng::new(1)).unwrap().unwrap();
    let before = image.digest().unwrap();
    let output = check(&[], image.path());
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.starts_with("E-DEVICE: tree 3 bytenr "), "{text}");
    assert!(text.lines().last().unwrap().contains("E-DEVICE"), "{text}");

    let output = check(&["--json"], image.path());
    assert_eq!(output.status.code(), Some(1));
    let lines: Vec<Value> = stdout(&output).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["code"], "E-DEVICE");
    assert_eq!(lines[0]["tree"], 3);
    let last = lines.last().unwrap();
    assert_eq!((&last["clean"], &last["complete"]), (&Value::Bool(false), &Value::Bool(true)));
    assert_eq!(before, image.digest().unwrap());
}

#[test]
fn a_first_superblock_of_zeros_is_damage() {
    let image = made();
    image.write_at(64 << 10, &[0; 4096]).unwrap();
    let output = check(&[], image.path());
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.starts_with("E-SUPER-MIRROR: bytenr 65536: ") && text.contains("overwritten with zeros"), "{text}");
    assert!(!text.contains("W-SUPER-MISSING"), "{text}");
    // Superblock copies other than the first may be missing, as on a restored metadata image.
    let image = made();
    image.write_at(64 << 20, &[0; 4096]).unwrap();
    let output = check(&[], image.path());
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.starts_with("W-SUPER-MISSING: ") && text.contains("was never written"), "{text}");
}

#[test]
fn an_unreadable_image_has_another_exit_status_than_damage() {
    let noise = Image::empty(64 << 20).unwrap();
    let missing = noise.path().with_extension("missing");
    let future = made();
    // Set the unknown bit 40 of the incompat features.
    future.patch_superblocks(|raw| raw[193] = 1).unwrap();
    for image in [noise.path(), &missing, future.path()] {
        let output = check(&[], image);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.starts_with("ubtrfs: ") && text.lines().count() == 1, "{text}");
        assert!(output.stdout.is_empty());
    }
    let held = made();
    let _device = FileDevice::open(held.path(), Access::ReadWrite).unwrap();
    assert_eq!(check(&[], held.path()).status.code(), Some(2));
}

#[test]
fn unknown_features_that_allow_reading_are_tolerated() {
    let image = made();
    // Set the unknown bit 40 of the compat_ro features.
    image.patch_superblocks(|raw| raw[185] = 1).unwrap();
    let output = check(&[], image.path());
    assert_eq!(output.status.code(), Some(0), "{}", stdout(&output));
}

fn rescue(args: &[&str], image: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
    command.args(["rescue", "super-recover"]).args(args).arg(image).stdin(Stdio::null()).output().unwrap()
}

/// With the first superblock missing or damaged, `check` names the remedy, the remedy works, and Linux mounts the
/// result.
#[test]
fn a_lost_superblock_is_written_anew_from_a_good_copy() {
    if !capability::kernel_oracle() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let pristine = dir.path().join("pristine.img");
    let mut mkfs = Command::new(env!("CARGO_BIN_EXE_ubtrfs"));
    let source = tempfile::tempdir().unwrap();
    std::fs::write(source.path().join("f"), "content").unwrap();
    let made = mkfs.args(["mkfs", "-q", "-b", "256M", "-r"]).arg(source.path()).arg(&pristine).status().unwrap();
    assert!(made.success());
    let whole = Image::copy_of(&pristine).unwrap();
    let output = rescue(&["-v"], whole.path());
    assert!(output.status.success() && stdout(&output).contains("All superblocks are valid"), "{}", stdout(&output));

    let first = whole.read_at(64 << 10, 4096).unwrap();
    let damage = [vec![0; 4096], Rng::new(7).bytes(4096), [&first[..3000], &[0xff; 1096]].concat()];
    for (nr, damage) in damage.iter().enumerate() {
        let image = Image::copy_of(&pristine).unwrap();
        image.write_at(64 << 10, damage).unwrap();
        let checked = check(&[], image.path());
        let told = format!("{}{}", stdout(&checked), String::from_utf8_lossy(&checked.stderr));
        assert!(told.contains("ubtrfs rescue super-recover"), "{nr}: {told}");
        let before = image.digest().unwrap();
        // Without a terminal, the command cannot ask for confirmation.
        let asked = rescue(&[], image.path());
        assert_eq!((asked.status.code(), image.digest().unwrap()), (Some(1), before), "{nr}");
        let output = rescue(&["-y", "-v"], image.path());
        let text = stdout(&output);
        assert!(output.status.success(), "{nr}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains(": 65536: bad: ") && text.contains("wrote the superblock at 65536"), "{nr}: {text}");
        assert!(image.read_at(64 << 10, 4096).unwrap() == first, "{nr}");
        assert_eq!(check(&[], image.path()).status.code(), Some(0), "{nr}");
        btrfs_check(image.path()).unwrap();
        let mount = LoopMount::new(image.path(), "").unwrap();
        assert_eq!(std::fs::read(mount.join("f")).unwrap(), b"content");
        mount.scrub().unwrap();
        mount.close().unwrap();
    }

    // The command repairs a bad mirror, but refuses an image without any good copy of the superblock.
    let image = Image::copy_of(&pristine).unwrap();
    image.write_at(64 << 20, &damage[2]).unwrap();
    assert!(rescue(&["-y"], image.path()).status.success());
    assert_eq!(image.digest().unwrap(), whole.digest().unwrap());
    for offset in [64 << 10, 64 << 20] {
        image.write_at(offset, &damage[2]).unwrap();
    }
    let before = image.digest().unwrap();
    assert_eq!((rescue(&["-y"], image.path()).status.code(), image.digest().unwrap()), (Some(1), before));

    // The command refuses a superblock copy with a bad root address as the source, and an image in use as the target.
    let image = Image::copy_of(&pristine).unwrap();
    image.patch_superblocks(|raw| raw[80..88].copy_from_slice(&(1u64 << 40).to_le_bytes())).unwrap();
    image.write_at(64 << 10, &damage[0]).unwrap();
    let before = image.digest().unwrap();
    let output = rescue(&["-y"], image.path());
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot be opened"), "{output:?}");
    assert_eq!((output.status.code(), image.digest().unwrap()), (Some(1), before));
    let image = Image::copy_of(&pristine).unwrap();
    image.write_at(64 << 20, &damage[2]).unwrap();
    let mount = LoopMount::new(image.path(), "ro").unwrap();
    let refused = rescue(&["-y"], image.path());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("mounted by the kernel"), "{refused:?}");
    mount.close().unwrap();
}
