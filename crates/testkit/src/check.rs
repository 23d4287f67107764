//! Checks images with `btrfs check`, which must exit with 0 and print no problem, and with `ubtrfs check`. Both
//! checkers also verify checksums of file data.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use ubtrfs_check::{Code, Options, Problem};
use ubtrfs_device::Device;
use ubtrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};

use crate::LoopArray;
use crate::command::untroubled;

/// The errors that `ubtrfs check` finds on the devices of a filesystem, data included.
pub fn ubtrfs_check_errors(devices: Vec<Arc<dyn Device>>) -> Result<Vec<String>> {
    let (errors, is_complete) = problems(devices, |problem| problem.code.is_error())?;
    ensure!(is_complete, "the check is not complete: {errors:?}");
    Ok(errors)
}

/// The problems that `ubtrfs check` finds and `counts` chooses, and whether everything was checked.
fn problems(devices: Vec<Arc<dyn Device>>, counts: impl Fn(&Problem) -> bool) -> Result<(Vec<String>, bool)> {
    let mut found = Vec::new();
    let mut tell = |problem: Problem| {
        if counts(&problem) {
            found.push(problem.to_string());
        }
    };
    let options = Options { data_csums: true, ..Options::default() };
    let report = ubtrfs_check::check(devices, options, &(), &mut tell)?;
    Ok((found, report.complete))
}

/// Fails with the checkers' output unless `btrfs check` and [`second_opinion`] find the filesystem clean.
pub fn btrfs_check(image: &Path) -> Result<()> {
    by_btrfs(image, false)?;
    second_opinion(image)
}

/// Works like [`btrfs_check`], for an image whose device failed: bad copies of a block are allowed if another copy is
/// good.
pub fn btrfs_check_after_failures(image: &Path) -> Result<()> {
    by_btrfs(image, false)?;
    opinion_but_on(&[image], &[Code::SuperMirror, Code::BlockCopy])
}

/// Works like [`btrfs_check`], for the images of an array. Images that are not given are missing.
pub fn btrfs_check_array(images: &[impl AsRef<Path>]) -> Result<()> {
    let array = LoopArray::over(images)?;
    let first = array.paths().first().map(PathBuf::from).context("an array has a member")?;
    let mut raw = vec![0; SUPERBLOCK_SIZE];
    File::open(images[0].as_ref())?.read_exact_at(&mut raw, SUPERBLOCK_OFFSETS[0])?;
    let is_degraded = (images.len() as u64) < Superblock::decode(&raw)?.num_devices;
    by_btrfs(&first, is_degraded)?;
    drop(array);
    let missing = is_degraded.then_some(Code::DeviceMissing);
    opinion_but_on(images, &[&[Code::SuperMirror], missing.as_slice()].concat())
}

/// Fails with the output of `btrfs check` unless `btrfs check` finds the filesystem clean.
///
/// The normal mode of `btrfs check` (version 6.2) reports an error without naming it if a snapshot shares the leaf of a
/// file that was deleted and is still open, also on images made by Linux. The mode `lowmem` does not have this fault.
/// So if the normal mode reports only this error, the result of `lowmem` counts.
fn by_btrfs(image: &Path, is_degraded: bool) -> Result<()> {
    let is_complaint = |line: &str| is_complaint(line) && !(is_degraded && line.ends_with(" is missing"));
    const ARGS: [&str; 2] = ["--readonly", "--check-data-csum"];
    const UNNAMED: [&str; 2] = ["bytes used, error(s) found", "ERROR: errors found in fs roots"];
    let (mut success, mut text) = btrfs_check_output(image, &ARGS)?;
    if !success
        && text.lines().filter(|line| is_complaint(line)).all(|line| UNNAMED.iter().any(|end| line.ends_with(end)))
    {
        (success, text) = btrfs_check_output(image, &[&ARGS[..], &["--mode=lowmem"]].concat())?;
    }
    let complaints: Vec<&str> = text.lines().filter(|line| is_complaint(line)).collect();
    if !success || !complaints.is_empty() {
        bail!("btrfs check of {} is not clean: {}\n{text}", image.display(), complaints.join("; "));
    }
    Ok(())
}

/// Fails with all errors and all wrong quota numbers that `ubtrfs check --check-data-csum` finds. Bad copies of the
/// superblock are allowed, because a power cut may leave a torn copy, and the next commit repairs it.
pub fn second_opinion(image: &Path) -> Result<()> {
    opinion_but_on(&[image], &[Code::SuperMirror])
}

/// Works like [`second_opinion`], but wrong quota numbers are allowed.
pub(crate) fn opinion_without_quotas(image: &Path) -> Result<()> {
    opinion_but_on(&[image], &[Code::SuperMirror, Code::Qgroup])
}

fn opinion_but_on(images: &[impl AsRef<Path>], none_of: &[Code]) -> Result<()> {
    let mut devices: Vec<Arc<dyn Device>> = Vec::new();
    for image in images {
        devices.push(Arc::new(Unlocked::open(image.as_ref())?));
    }
    let (lines, is_complete) = problems(devices, |problem| {
        // The checker reports wrong quota numbers only as a warning. Here they count as an error, because the engine
        // must keep quota numbers exact.
        let counts = problem.code.is_error() || problem.code == Code::Qgroup;
        counts && !none_of.contains(&problem.code)
    })?;
    if !lines.is_empty() || !is_complete {
        let names: Vec<String> = images.iter().map(|image| image.as_ref().display().to_string()).collect();
        bail!("ubtrfs check of {} finds what btrfs check does not:\n{}", names.join(" "), lines.join("\n"));
    }
    Ok(())
}

/// Runs `btrfs check` with these arguments. Returns whether the program succeeded, and its output.
pub fn btrfs_check_output(image: &Path, args: &[&str]) -> Result<(bool, String)> {
    untroubled(
        || -> Result<(bool, String)> {
            let mut command = Command::new("btrfs");
            let output = command.arg("check").args(args).arg(image).env("LC_ALL", "C").output();
            let output = output.context("cannot start btrfs check")?;
            let said = [output.stdout, output.stderr].map(|part| String::from_utf8_lossy(&part).into_owned()).concat();
            Ok((output.status.success(), said))
        },
        |done| done.as_ref().map(|(_, text)| text.clone()).unwrap_or_default(),
    )
}

/// Referenced and exclusive bytes of each quota group, by the group's id.
pub type QuotaNumbers = BTreeMap<String, (u64, u64)>;

/// Returns the quota numbers that `btrfs check` counts, and the quota numbers that the image stores.
pub fn quota_report(image: &Path) -> Result<(QuotaNumbers, QuotaNumbers)> {
    let (_, text) = btrfs_check_output(image, &["--readonly", "--qgroup-report"])?;
    let (mut counted, mut stored) = (QuotaNumbers::new(), QuotaNumbers::new());
    let mut group = String::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let Some(id) = line.strip_prefix("Counts for qgroup id: ") {
            group = id.split_whitespace().next().unwrap_or_default().to_owned();
        }
        let (side, kind, bytes) = match words[..] {
            ["our:", kind, bytes, ..] => (&mut counted, kind, bytes),
            ["disk:", kind, bytes, ..] => (&mut stored, kind, bytes),
            _ => continue,
        };
        let numbers = side.entry(group.clone()).or_default();
        let bytes = bytes.parse().with_context(|| line.to_owned())?;
        if kind == "referenced" { numbers.0 = bytes } else { numbers.1 = bytes }
    }
    ensure!(!counted.is_empty(), "btrfs check reports no quota groups:\n{text}");
    Ok((counted, stored))
}

/// Fails unless the quota numbers of the image equal those that `btrfs check` counts.
pub fn check_quotas(image: &Path) -> Result<()> {
    let (counted, stored) = quota_report(image)?;
    let wrong = counted.iter().filter(|(id, numbers)| stored.get(*id) != Some(numbers));
    let wrong: Vec<String> =
        wrong.map(|(id, numbers)| format!("{id}: {:?}, counted {numbers:?}", stored.get(id))).collect();
    ensure!(wrong.is_empty(), "wrong quota numbers: {}", wrong.join("; "));
    Ok(())
}

fn is_complaint(line: &str) -> bool {
    let lower = line.to_lowercase();
    let bad =
        ["error", "warning", "mismatch", "corrupt", "invalid", "missing", "wrong", "unresolved", "orphan", "bad "];
    // These lines are harmless: a clean check ends with "no error found", and a v1 free space cache is stale if the
    // last writer does not maintain it.
    let harmless = lower.contains("no error found")
        || lower.contains("cache and super generation don't match")
        || lower.contains("space cache will be invalidated")
        // btrfs-progs scans all block devices for members of the array. It cannot read a free loop device.
        || lower.starts_with("error: cannot scan /dev/loop");
    !harmless && bad.iter().any(|word| lower.contains(word))
}

/// An image that is read without taking its lock, as `btrfs check` does: a test that has closed its filesystem may
/// still hold the image's device, and with it the lock.
#[derive(Debug)]
struct Unlocked {
    file: File,
    path: PathBuf,
    len_bytes: u64,
}

impl Unlocked {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path)?;
        let len_bytes = file.metadata()?.len();
        Ok(Self { file, path: path.to_owned(), len_bytes })
    }
}

fn read_only() -> io::Error {
    io::ErrorKind::PermissionDenied.into()
}

impl Device for Unlocked {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }

    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(read_only())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn describe(&self) -> String {
        self.path.display().to_string()
    }

    fn is_read_only(&self) -> bool {
        true
    }
}
