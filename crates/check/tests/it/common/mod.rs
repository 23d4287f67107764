//! Helpers for the tests of the checker.

#![allow(dead_code, clippy::unwrap_used, reason = "each test uses some of it, and fails by panicking")]

use std::path::Path;
use std::sync::Arc;

use ubtrfs_check::{Code, Options, Problem, Report};
use ubtrfs_device::{Access, Device, FileDevice};

/// Checks an image, data included, and collects all problems.
pub(crate) fn check(image: &Path) -> (Report, Vec<Problem>) {
    let device: Arc<dyn Device> = Arc::new(FileDevice::open(image, Access::ReadOnly).unwrap());
    let mut problems = Vec::new();
    let options = Options { data_csums: true, ..Options::default() };
    let report = ubtrfs_check::check(vec![device], options, &(), &mut |problem| problems.push(problem)).unwrap();
    // Some versions of mkfs.btrfs leave stale entries in the free space tree of every image.
    problems.retain(|problem: &Problem| problem.code != Code::FreeSpaceStale);
    (report, problems)
}

/// Fails if the checker finds a problem or a warning.
pub(crate) fn assert_clean(image: &Path, what: &str) {
    let (report, problems) = check(image);
    let lines: Vec<String> = problems.iter().map(Problem::to_string).collect();
    assert!(report.is_clean() && problems.is_empty(), "{what}: {report:?}\n{}", lines.join("\n"));
}
