//! Prunes: what stays, what goes, and in which order.

use std::time::SystemTime;

use ubtrfs_remote::{KeepRules, PrunePlan, StoreUsage, StoreWork};

use super::*;

fn last(count: u32) -> KeepRules {
    KeepRules { last: count, ..KeepRules::default() }
}

impl Bed {
    fn prune(&self, plan: &PrunePlan) -> Result<(), RemoteError> {
        let mark = self.store.begin(StoreWork::Prune).unwrap();
        self.store.prune(&mark, plan, &self.keys)
    }
}

#[test]
fn a_prune_removes_snapshots_and_their_parts_but_no_parent_of_a_kept_one() {
    let bed = Bed::encrypted();
    bed.push(1, None, &stream(1, 30_000)).unwrap();
    bed.push(2, Some(1), &stream(2, 30_000)).unwrap();
    bed.push(3, None, &stream(3, 30_000)).unwrap();
    bed.push(4, Some(3), &stream(4, 30_000)).unwrap();
    // A push that did not end.
    bed.inner.set(Faults { puts_left: Some(2), ..no_faults() });
    bed.push(5, None, &stream(5, 30_000)).unwrap_err();
    bed.inner.set(no_faults());
    let plan = bed.store.plan_prune(&bed.keys, &last(1), 0).unwrap();
    let stays: Vec<_> = plan.decisions.iter().map(|it| (it.manifest.key, it.stays(), it.needed_by)).collect();
    let expected = [(4, true, None), (3, true, Some(key(4))), (2, false, None), (1, false, None)];
    assert_eq!(stays, expected.map(|(nr, stays, by)| (key(nr), stays, by)));
    assert!(plan.orphans.is_empty(), "they are young");
    bed.prune(&plan).unwrap();
    assert_eq!(bed.store.snapshots().unwrap().len(), 2);
    assert_eq!(bed.inner.paths("/parts/").len(), 6 + 2);
    for nr in [3, 4] {
        assert_eq!(bed.pull(nr).unwrap(), stream(u64::try_from(nr).unwrap(), 30_000));
    }
    let plan = bed.store.plan_prune(&bed.keys, &last(1), i64::MAX).unwrap();
    assert_eq!(plan.orphans.len(), 2);
    bed.prune(&plan).unwrap();
    assert_eq!(bed.inner.paths("/parts/").len(), 6);
    assert_eq!(bed.inner.paths("").len(), 8);
}

#[test]
fn a_prune_that_was_away_removes_nothing_more() {
    let bed = Bed::plain();
    bed.push(1, None, &stream(1, 30_000)).unwrap();
    bed.push(2, Some(1), &stream(2, 30_000)).unwrap();
    bed.push(3, None, &stream(3, 30_000)).unwrap();
    let plan = bed.store.plan_prune(&bed.keys, &last(1), 0).unwrap();
    let before = bed.inner.paths("");
    let mark = bed.store.begin(StoreWork::Prune).unwrap();
    mark.lapse();
    assert!(matches!(bed.store.prune(&mark, &plan, &bed.keys), Err(RemoteError::Away)));
    drop(mark);
    assert_eq!(bed.inner.paths(""), before);
}

#[test]
fn marks_that_are_old_or_from_the_future_do_not_count() {
    // The times of a directory are those of its machine.
    let dir = tempfile::tempdir().unwrap();
    let store = RemoteStore::open(&format!("file://{}", dir.path().display()), StoreUsage::Write).unwrap();
    let marks = dir.path().join("marks");
    std::fs::create_dir(&marks).unwrap();
    let file = std::fs::File::create(marks.join("prune-killed")).unwrap();
    let now = SystemTime::now();
    let second = Duration::from_secs(1);
    for (written, counts) in [
        (now - 700 * second, false),
        (now - 300 * second, true),
        (now + 300 * second, true),
        (now + 3000 * second, false),
    ] {
        file.set_modified(written).unwrap();
        let begun = store.begin(StoreWork::Push);
        assert_eq!(begun.is_err(), counts, "{written:?}");
    }
}

#[test]
fn a_prune_that_cannot_read_everything_removes_nothing() {
    let bed = Bed::plain();
    bed.push(1, None, &stream(1, 100)).unwrap();
    bed.push(2, None, &stream(2, 100)).unwrap();
    let manifests = bed.inner.paths("/snapshots/");
    bed.inner.write(&manifests[1], b"{}".to_vec());
    let error = bed.store.plan_prune(&bed.keys, &last(1), 0).unwrap_err().to_string();
    assert!(error.contains("damaged"), "{error}");
}

#[test]
fn a_snapshot_that_is_pushed_meanwhile_stops_a_prune() {
    let bed = Bed::plain();
    bed.push(1, None, &stream(1, 100)).unwrap();
    bed.push(2, None, &stream(2, 100)).unwrap();
    let plan = bed.store.plan_prune(&bed.keys, &last(1), 0).unwrap();
    bed.push(3, Some(1), &stream(3, 100)).unwrap();
    let error = bed.prune(&plan).unwrap_err().to_string();
    assert!(error.contains("meanwhile"), "{error}");
    assert_eq!(bed.store.snapshots().unwrap().len(), 3);
}

#[test]
fn pushes_work_beside_pushes_and_prunes_alone() {
    let bed = Bed::plain();
    let (one, other) = (bed.store.begin(StoreWork::Push).unwrap(), bed.store.begin(StoreWork::Push).unwrap());
    let error = bed.store.begin(StoreWork::Prune).unwrap_err();
    assert!(matches!(&error, RemoteError::Busy { object, .. } if object.starts_with("marks/push-")), "{error}");
    one.check().unwrap();
    drop((one, other));
    let prune = bed.store.begin(StoreWork::Prune).unwrap();
    for work in [StoreWork::Push, StoreWork::Prune] {
        let error = bed.store.begin(work).unwrap_err();
        assert!(matches!(&error, RemoteError::Busy { object, .. } if object.starts_with("marks/prune-")), "{error}");
    }
    prune.lapse();
    assert!(matches!(prune.check(), Err(RemoteError::Away)));
    drop(prune);
    bed.store.begin(StoreWork::Push).unwrap();
    assert!(bed.inner.paths("").is_empty(), "each removes its mark");
}
