use super::*;

#[test]
fn without_nvml_and_log_there_are_absences_and_no_events() {
    let mut gpus = Gpus::start(10, Path::new("/nowhere/kmsg"));
    let mut events = Vec::new();
    gpus.stop(&mut events);
    let absences = gpus.take_absences();
    assert!(absences.iter().any(|absence| absence.what == XIDS && absence.why.contains("/nowhere/kmsg")));
    let count = |name: &str| gpus.ledger().iter().find(|row| row.name == name).map(|row| row.count);
    assert_eq!(count("kmsg_absent"), Some(1));
    // A machine that has NVML has readings, or says why not.
    assert!(!events.is_empty() || absences.iter().any(|absence| absence.what == READINGS), "{absences:?}");
}

#[test]
fn never_is_no_absence() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mut gpus = Gpus::start(0, log.path());
    gpus.stop(&mut Vec::new());
    assert_eq!(gpus.take_absences(), []);
    assert!(gpus.ledger().iter().all(|row| row.name == "kmsg_overrun"));
}
