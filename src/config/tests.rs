use super::*;

fn from_text(text: &str) -> Result<Settings, Error> {
    let mut layers = Layers::default();
    layers.text(Path::new("botmesh.toml"), text)?;
    Settings::from_layers(&layers)
}

fn fault(text: &str) -> String {
    from_text(text).expect_err("an error").to_string()
}

#[test]
fn l4_flag_wins_over_environment_over_file_over_default() {
    let mut layers = Layers::default();
    assert_eq!(Settings::from_layers(&layers).unwrap().lease, Duration::from_secs(15));
    layers.text(Path::new("f"), "lease = \"20s\"\nname = \"n7\"\n").unwrap();
    assert_eq!(Settings::from_layers(&layers).unwrap().lease, Duration::from_secs(20));
    let variables = [("BOTMESH_LEASE", "700ms"), ("PATH", "/bin"), ("BOTMESH__PARENT", "1")];
    layers.environment(variables.map(|(n, t)| (n.to_owned(), t.to_owned())).into_iter()).unwrap();
    assert_eq!(Settings::from_layers(&layers).unwrap().lease, Duration::from_millis(700));
    layers.flag("lease", Some("1m".to_owned()));
    let settings = Settings::from_layers(&layers).unwrap();
    assert_eq!(settings.lease, Duration::from_secs(60));
    assert_eq!(settings.name.as_deref(), Some("n7"), "keys nobody overrode stay");
}

#[test]
fn l4_an_unknown_key_is_named_with_its_line() {
    let fault = fault("# ours\nname = \"n1\"\nleese = \"15s\"\n");
    assert_eq!(fault, "botmesh.toml line 3: unknown key `leese`; did you mean `lease`?");
    let mut layers = Layers::default();
    let variables = [("BOTMESH_FROBNICATE".to_owned(), "1".to_owned())];
    let fault = layers.environment(variables.into_iter()).unwrap_err().to_string();
    assert!(fault.contains("BOTMESH_FROBNICATE") && fault.contains("--help"), "{fault}");
}

#[test]
fn l4_an_impossible_value_is_named_with_its_line() {
    for (text, parts) in [
        ("\nlease = \"0s\"", ["line 2", "`lease`", "500ms to 1h"]),
        ("lease = \"15\"", ["line 1", "`lease`", "\"15s\""]),
        ("hang_kill = \"5ms\"", ["line 1", "`hang_kill`", "100ms to 1h"]),
        ("lease = 15", ["line 1", "`lease`", "\"15s\""]),
        ("nodes = 0", ["line 1", "`nodes`", "1 to 9"]),
        ("public = \"8101\"", ["line 1", "`public`", "HOST:PORT"]),
        ("cluster = \"h:99999\"", ["line 1", "`cluster`", "65535"]),
        ("advertise = \"0.0.0.0:9101\"", ["line 1", "`advertise`", "cannot dial"]),
        ("reply_url = \"ftp://x\"", ["line 1", "`reply_url`", "http://"]),
        ("name = \"a b\"", ["line 1", "`name`", "only A-Z"]),
        ("restart = \"maybe\"", ["line 1", "`restart`", "true or false"]),
        ("name = { a = 1 }", ["line 1", "`name`", "string"]),
        ("disk_low_water = \"64 parsecs\"", ["line 1", "`disk_low_water`", "64MiB"]),
        ("beat = \"1ms\"", ["line 1", "`beat`", "20ms to 5s"]),
        ("dedupe_window = \"1ms\"", ["line 1", "`dedupe_window`", "1s to 1year"]),
        ("dedupe_ids = 0", ["line 1", "`dedupe_ids`", "1 to 100000000"]),
        ("snapshot_every = 7", ["line 1", "`snapshot_every`", "50"]),
        ("log = \"loud,=\"", ["line 1", "`log`", "filter"]),
    ] {
        let fault = fault(text);
        assert!(parts.iter().all(|part| fault.contains(part)), "{text}: {fault}");
    }
    let fault = fault("name = \"n1\"\nlease = \n");
    assert!(fault.contains("line 2") && fault.contains("TOML"), "{fault}");
}

#[test]
fn n2_ways_to_begin_exclude_each_other() {
    let peers = "peers = [\"a:1\", \"b:1\", \"c:1\"]\n";
    assert_eq!(from_text("bootstrap = true").unwrap().beginning, Beginning::Bootstrap);
    assert_eq!(from_text("").unwrap().beginning, Beginning::Member);
    let Beginning::Expect(3, list) =
        from_text(&format!("bootstrap_expect = 3\n{peers}")).unwrap().beginning
    else {
        panic!("a symmetric start")
    };
    assert_eq!(list.len(), 3);
    let both = fault("join = \"a:1\"\nbootstrap = true");
    assert!(both.contains("`join`") && both.contains("`bootstrap`"), "{both}");
    assert!(fault("bootstrap_expect = 3").contains("--peers"));
    assert!(fault(peers).contains("--bootstrap-expect"));
    assert!(fault("bootstrap_expect = 3\npeers = \"a:1,b:1\"").contains("name 3 peers"));
    assert!(fault("bootstrap_expect = 2\npeers = \"a:1,a:1\"").contains("twice"));
}

#[test]
fn l4_every_key_is_in_the_readme_with_its_flag_and_variable() {
    let readme = include_str!("../../README.md");
    for key in KEYS {
        let row = format!("| `{}` |", key.name);
        assert!(readme.contains(&row), "the README lacks a row {row}");
    }
}

#[test]
fn addresses_print_as_they_are_read() {
    for text in ["127.0.0.1:9101", "n1.mesh:80", "[::1]:0"] {
        assert_eq!(HostPort::parse(text).unwrap().to_string(), text);
    }
    for text in ["", ":", "a", "a:b", "::1:80", "[::1", "[x]:1", ":80", "a b:1"] {
        assert!(HostPort::parse(text).is_err(), "{text:?}");
    }
    let base = HostPort::parse("127.0.0.1:65534").unwrap();
    assert_eq!(base.nth(1).unwrap().port, 65535);
    assert_eq!(base.nth(2), None);
}
